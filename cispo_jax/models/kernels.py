"""Kept kernels for softmax attention over whole sequences, as functions of the arguments of `attention.attend`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cispo_jax.sharding import BATCH, batch_devices

LANES = 128  # of a TPU: the blocks of its kernel are multiples
SPLASH_BLOCK = 512  # tokens of a block of queries and of keys


def splash(query_BTNH, key_BTMH, value_BTMH, segment_BT, *, interpret: bool = False) -> jax.Array:
    """Splash attention, a Pallas kernel for TPUs: the blocks above the diagonal are left out, segments are masked.

    Each device runs it on its own rows and heads. `interpret`: on any device, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    B, T, N, H = query_BTNH.shape
    columns = -(-T // LANES) * LANES
    block = min(SPLASH_BLOCK, columns)
    columns = -(-columns // block) * block
    sizes = library.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block),
        **dict.fromkeys(("block_q_dq", "block_kv_dq"), block),
    )
    mesh = jax.sharding.get_abstract_mesh()
    split = not mesh.empty and mesh.size > 1
    heads = N // mesh.shape["tensor"] if split else N

    def rows(query, key, value, segment):
        mask = library.MultiHeadMask([library.CausalMask((columns, columns))] * heads)
        kernel = library.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
        of_row = lambda q, k, v, ids: kernel(q, k, v, segment_ids=library.SegmentIds(ids, ids))
        return jax.vmap(of_row)(query, key, value, segment)

    # Columns that fill the last block are pads: as keys nobody sees them but pads.
    fill = lambda x: jnp.pad(x, ((0, 0), (0, columns - T), *((0, 0),) * (x.ndim - 2)))
    by_heads = lambda x: jnp.swapaxes(fill(x), 1, 2)
    arrays = (by_heads(query_BTNH * H**-0.5), by_heads(key_BTMH), by_heads(value_BTMH), fill(segment_BT))
    if split:
        batch = BATCH if B % batch_devices(mesh) == 0 else None
        of_heads, of_ids = P(batch, "tensor", None, None), P(batch, None)
        specs = (of_heads, of_heads, of_heads, of_ids)
        rows = jax.shard_map(rows, in_specs=specs, out_specs=of_heads, check_vma=False)
    return jnp.swapaxes(rows(*arrays), 1, 2)[:, :T].astype(value_BTMH.dtype)


def cudnn(query_BTNH, key_BTMH, value_BTMH, segment_BT) -> jax.Array:
    """cuDNN's flash attention, for one sequence a row with pads at its end only: it masks by position, not by segment."""
    return jax.nn.dot_product_attention(query_BTNH, key_BTMH, value_BTMH, is_causal=True, implementation="cudnn")


KERNELS = {"splash": splash, "cudnn": cudnn}
