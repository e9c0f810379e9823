"""Grouped-query softmax attention: over whole sequences, packed or not, and one token at a time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.kernels import KERNELS
from cispo_jax.models.layers import Span, normal, ones, rms_norm, rotate, zeros
from cispo_jax.sharding import param

# Tokens of a block of queries and of keys: 4 MiB of scores a head. Smaller ones read and write the running sums more often.
BLOCK = 1024
# Shorter rows: parts of their queries, and the least tokens of a part.
PARTS, LEAST_PART = 4, 128


class KeyValues(NamedTuple):
    """Keys and values of the tokens so far; stacked over layers they have a leading axis."""

    key_BSMH: jax.Array
    value_BSMH: jax.Array


class Attention(nnx.Module):
    """Query, key, value and output projections (GQA, arXiv:2305.13245), optional biases and QK norm."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        D, N, M, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.norm_eps = config.norm_eps
        keys = jax.random.split(key, 4)
        self.query = param(keys[0], normal, (D, N, H), ("embed", "heads", "head_dim"))
        self.key = param(keys[1], normal, (D, M, H), ("embed", "kv_heads", "head_dim"))
        self.value = param(keys[2], normal, (D, M, H), ("embed", "kv_heads", "head_dim"))
        self.output = param(keys[3], normal, (N, H, D), ("heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.query_bias = param(None, zeros, (N, H), ("heads", "head_dim"))
            self.key_bias = param(None, zeros, (M, H), ("kv_heads", "head_dim"))
            self.value_bias = param(None, zeros, (M, H), ("kv_heads", "head_dim"))
        if config.qk_norm:
            self.query_norm = param(None, ones, (H,), ("norm",))
            self.key_norm = param(None, ones, (H,), ("norm",))

    def __call__(self, x_BTD: jax.Array, span: Span, slope_N: jax.Array) -> tuple[jax.Array, KeyValues]:
        """Output [B, T, D] and the keys and values of these columns."""
        query, key, value = self.project(x_BTD, span.rotary)
        return self.combine(attend(query, key, value, span.segment_BT, span.prefix_BT, kernel=span.kernel)), KeyValues(
            key, value
        )

    def step(
        self,
        x_BTD: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        slope_N: jax.Array,
        stacked: KeyValues,
        seen_BS: jax.Array,
        layer: jax.Array,
        slot: jax.Array,
        shared: tuple[KeyValues, jax.Array] | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        """One token a row, written at column `slot` of its layer in the stacked memory, in place in a loop's carry.

        `shared`: stacked keys and values of the P prompts that the rows go on from, and which of their columns are seen.
        """
        query, *new = self.project(x_BTD, rotary)
        write = lambda x, x_BTMH: jax.lax.dynamic_update_slice(x, x_BTMH[None].astype(x.dtype), (layer, 0, slot, 0, 0))
        stacked = KeyValues(*map(write, stacked, new))
        of_layer = lambda stacked: KeyValues(*(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in stacked))
        if shared is None:
            return self.combine(_at_once(query, *of_layer(stacked), seen_BS[:, None])), stacked
        prompts, seen_PS = shared
        return self.combine(_after_prompts(query, of_layer(prompts), seen_PS, of_layer(stacked), seen_BS)), stacked

    @staticmethod
    def with_room(stacked: KeyValues, room: int) -> KeyValues:
        """Empty columns for `room` more tokens."""
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))), stacked)

    def project(self, x_BTD: jax.Array, rotary) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B, T, N, H] and keys [B, T, M, H], and values [B, T, M, H]."""
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", x_BTD, w[...].astype(x_BTD.dtype)) for w in (self.query, self.key, self.value)
        )
        if hasattr(self, "query_bias"):
            query, key, value = (
                x + bias[...].astype(x.dtype)[None, None]
                for x, bias in ((query, self.query_bias), (key, self.key_bias), (value, self.value_bias))
            )
        if hasattr(self, "query_norm"):
            query = rms_norm(query, self.query_norm[...], self.norm_eps)
            key = rms_norm(key, self.key_norm[...], self.norm_eps)
        return rotate(query, rotary), rotate(key, rotary), value

    def combine(self, heads_BTNH: jax.Array) -> jax.Array:
        return jnp.einsum("btnh,nhd->btd", heads_BTNH, self.output[...].astype(heads_BTNH.dtype))


def attend(
    query_BTNH: jax.Array,
    key_BTMH: jax.Array,
    value_BTMH: jax.Array,
    segment_BT: jax.Array,
    prefix_BT: jax.Array | None = None,
    *,
    kernel: str = "blocks",
    block: int = BLOCK,
) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the keys that a query sees (`Span`), softmax in float32; each key head serves N/M query heads.

    Rows of up to `block` tokens are split into a few parts of queries, each with the keys up to its end. Longer ones go block by block,
    forward and backward, so that memory grows with T, not with T x T, and blocks that no query sees are left out. All of this in plain
    operations; another `kernel` is one of `kernels.KERNELS`, which know no prefixes.
    """
    T = query_BTNH.shape[1]
    ids = (segment_BT, segment_BT if prefix_BT is None else prefix_BT)
    with jax.named_scope("attend"):
        if kernel != "blocks":
            if prefix_BT is not None:
                raise ValueError(f"kernel={kernel!r} cannot mask prefixes; blocks can")
            return KERNELS[kernel](query_BTNH, key_BTMH, value_BTMH, segment_BT)
        if block < T:
            # Columns that fill the last block: as queries nobody reads them, as keys nobody sees segment 0 but pads.
            fill = lambda x: jnp.pad(x, ((0, 0), (0, -T % block), *((0, 0),) * (x.ndim - 2)))
            return _blockwise(block, *map(fill, (query_BTNH, key_BTMH, value_BTMH, *ids)))[:, :T]
        size = -(-T // min(PARTS, -(-T // LEAST_PART)))
        outputs = []
        for start in range(0, T, size):
            end = min(start + size, T)
            seen = _sees(ids[0][:, start:end], ids[1][:, start:end], segment_BT[:, :end], start, 0)
            outputs.append(_at_once(query_BTNH[:, start:end], key_BTMH[:, :end], value_BTMH[:, :end], seen))
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def _at_once(query_BTNH, key_BSMH, value_BSMH, seen_BTS) -> jax.Array:
    """All scores [B, N, T, S] at once."""
    B, T, N, H = query_BTNH.shape
    M = key_BSMH.shape[2]
    scores = _scores(query_BTNH.reshape(B, T, M, N // M, H), key_BSMH, seen_BTS)
    weights = jax.nn.softmax(scores, axis=-1).astype(value_BSMH.dtype)
    return jnp.einsum("bmgts,bsmh->btmgh", weights, value_BSMH).reshape(B, T, N, H)


def _after_prompts(query_BTNH, prompts: KeyValues, seen_PS, own: KeyValues, seen_BT) -> jax.Array:
    """One query a row over the columns of its prompt, which B / P rows read together, and its own."""
    (B, _, N, H), (P, S, M, _) = query_BTNH.shape, prompts.key_BSMH.shape
    # [P, B / P, M, N / M, H] as rows of one product a prompt and key head.
    query_PRMGH = query_BTNH.reshape(P, B // P, M, N // M, H)
    scores = _scores(query_PRMGH, prompts.key_BSMH, jnp.broadcast_to(seen_PS[:, None], (P, B // P, S)))
    of_prompts = jnp.moveaxis(scores, 3, 1).reshape(B, M, N // M, 1, S)
    of_own = _scores(query_BTNH.reshape(B, 1, M, N // M, H), own.key_BSMH, seen_BT[:, None])
    weights = jax.nn.softmax(jnp.concatenate([of_prompts, of_own], axis=-1), axis=-1).astype(own.value_BSMH.dtype)
    of_prompts = weights[..., :S].reshape(P, B // P, M, N // M, S)
    output = jnp.einsum("prmgs,psmh->prmgh", of_prompts, prompts.value_BSMH).reshape(B, 1, N, H)
    return output + jnp.einsum("bmgts,bsmh->btmgh", weights[..., S:], own.value_BSMH).reshape(B, 1, N, H)


def _sees(segment_BT, prefix_BT, segment_BS, first_T, first_S) -> jax.Array:
    """[B, T, S]: which keys a query sees; queries and keys begin at the given columns."""
    columns = lambda x, first: first + jnp.arange(x.shape[1])
    own, prefix = (x[:, :, None] == segment_BS[:, None, :] for x in (segment_BT, prefix_BT))
    return (own | prefix) & (columns(segment_BT, first_T)[:, None] >= columns(segment_BS, first_S)[None, :])[None]


def _scores(query_BTMGH, key_BSMH, seen_BTS) -> jax.Array:
    """[B, M, G, T, S] in float32, as good as minus infinity where a query does not see a key."""
    scores = jnp.einsum("btmgh,bsmh->bmgts", query_BTMGH, key_BSMH, preferred_element_type=jnp.float32)
    return jnp.where(seen_BTS[:, None, None], scores * query_BTMGH.shape[-1] ** -0.5, -1e30)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(size: int, query_BTNH, key_BTMH, value_BTMH, segment_BT, prefix_BT) -> jax.Array:
    """FlashAttention (arXiv:2205.14135) in plain operations; T is a multiple of `size`."""
    return _blockwise_forward(size, query_BTNH, key_BTMH, value_BTMH, segment_BT, prefix_BT)[0]


def _first_blocks(size: int, segment_BT, prefix_BT) -> jax.Array:
    """For each block of queries the first block of keys that one of them sees, in any row: where the prompt begins that it goes on from."""
    T = segment_BT.shape[1]
    before_BT = jnp.pad(jax.lax.cummax(segment_BT, axis=1)[:, :-1], ((0, 0), (1, 0)))
    start_BT = segment_BT > before_BT
    begins_BT = jnp.where(start_BT & (segment_BT == prefix_BT), jnp.arange(T)[None], 0)
    return jax.lax.cummax(begins_BT, axis=1).min(axis=0).reshape(-1, size)[:, 0] // size


def _blockwise_forward(size: int, query, key, value, segment_BT, prefix_BT):
    (B, T, N, H), M = query.shape, key.shape[2]
    query = query.reshape(B, T, M, N // M, H)
    scores_of = functools.partial(_block_scores, size, query, key, segment_BT, prefix_BT)
    first = _first_blocks(size, segment_BT, prefix_BT)

    def one_block(i):
        def add(j, carry):
            highest, total, weighted = carry
            scores = scores_of(i, j)
            higher = jnp.maximum(highest, scores.max(axis=-1))
            scale, weights = jnp.exp(highest - higher), jnp.exp(scores - higher[..., None])
            product = jnp.einsum(
                "bmgts,bsmh->bmgth",
                weights.astype(value.dtype),
                _block(value, j, size),
                preferred_element_type=jnp.float32,
            )
            return higher, total * scale + weights.sum(axis=-1), weighted * scale[..., None] + product

        G = N // M
        start = (jnp.full((B, M, G, size), -1e30), jnp.zeros((B, M, G, size)), jnp.zeros((B, M, G, size, H)))
        # The loop's bounds depend on the data; the backward pass below does not differentiate it.
        highest, total, weighted = jax.lax.fori_loop(first[i], i + 1, add, start)
        return (weighted / total[..., None]).astype(value.dtype), highest + jnp.log(total)

    output, log_total = jax.lax.map(one_block, jnp.arange(T // size))
    output = jnp.moveaxis(output, (0, 4), (1, 2)).reshape(B, T, N, H)
    return output, (query, key, value, segment_BT, prefix_BT, output, log_total)


def _blockwise_backward(size: int, residuals, cotangent):
    query, key, value, segment_BT, prefix_BT, output, log_total = residuals
    T, H = query.shape[1], query.shape[-1]
    output, cotangent = (x.reshape(query.shape) for x in (output, cotangent))
    scores_of = functools.partial(_block_scores, size, query, key, segment_BT, prefix_BT)
    first = _first_blocks(size, segment_BT, prefix_BT)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    along = jnp.sum(output.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)  # [B, T, M, G]

    def one_block(query_gradient, j):
        key_j, value_j = (_block(x, j, size) for x in (key, value))

        def add(i, carry):
            query_gradient, key_gradient, value_gradient = carry
            query_i, cotangent_i, along_i = (_block(x, i, size) for x in (query, cotangent, along))
            weights = jnp.exp(scores_of(i, j) - log_total[i][..., None])
            value_gradient += einsum("bmgts,btmgh->bsmh", weights.astype(value.dtype), cotangent_i)
            products = einsum("btmgh,bsmh->bmgts", cotangent_i, value_j)
            scores = weights * (products - jnp.moveaxis(along_i, 1, -1)[..., None]) * H**-0.5
            scores = scores.astype(query.dtype)
            key_gradient += einsum("bmgts,btmgh->bsmh", scores, query_i)
            of_query = _block(query_gradient, i, size) + einsum("bmgts,bsmh->btmgh", scores, key_j)
            query_gradient = jax.lax.dynamic_update_slice_in_dim(query_gradient, of_query, i * size, axis=1)
            return query_gradient, key_gradient, value_gradient

        start = (query_gradient, *(jnp.zeros(x.shape, jnp.float32) for x in (key_j, value_j)))
        # `first` never falls from block to block: those that see block j lie together.
        query_gradient, *gradients = jax.lax.fori_loop(j, jnp.sum(first <= j), add, start)
        return query_gradient, [g.astype(x.dtype) for g, x in zip(gradients, (key, value), strict=True)]

    query_gradient, gradients = jax.lax.scan(one_block, jnp.zeros(query.shape, jnp.float32), jnp.arange(T // size))
    gradients = [jnp.moveaxis(g, 0, 1).reshape(key.shape) for g in gradients]
    no_gradient = [np.zeros(x.shape, jax.dtypes.float0) for x in (segment_BT, prefix_BT)]
    query_gradient = query_gradient.reshape(*query.shape[:2], -1, H)
    return query_gradient.astype(query.dtype), *gradients, *no_gradient


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _block_scores(size: int, query, key, segment_BT, prefix_BT, i, j) -> jax.Array:
    """Scores of block i of the queries against block j of the keys."""
    query_i, segment_i, prefix_i = (_block(x, i, size) for x in (query, segment_BT, prefix_BT))
    key_j, segment_j = (_block(x, j, size) for x in (key, segment_BT))
    return _scores(query_i, key_j, _sees(segment_i, prefix_i, segment_j, i * size, j * size))


def _block(x: jax.Array, index, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
