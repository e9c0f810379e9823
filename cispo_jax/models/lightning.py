"""Lightning attention: linear attention with a decay per head (arXiv:2401.04658, MiniMax-01 arXiv:2501.08313), in two forms.

    out_t = sum over s <= t of exp(-slope (t - s)) (q_t . k_s) v_s

over the tokens that t sees (its segment and that segment's prefix), t - s counted in tokens: pads neither contribute nor let the sum
decay. With the state S_t = exp(-slope) S_(t-1) + k_t v_t^T it is out_t = q_t S_t, the recurrent form of decoding;
`lightning_attention` computes it a block of tokens at a time, linear in T. No softmax, no rotary positions, no 1/sqrt(H).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.layers import Span, normal, ones, rms_norm
from cispo_jax.sharding import param

NORM_EPS = 1e-6  # of the norm over all heads, whatever the config's eps


def slopes(config: TransformerConfig) -> np.ndarray:
    """[L, N]: minus the log of the decay per token, 2^(-8 (h + 1) / N) x (1 - layer / (L - 1 + 1e-5) + 1e-5)."""
    head = 2.0 ** (-8 * (np.arange(config.num_heads) + 1) / config.num_heads)
    layer = 1 - np.arange(config.num_layers) / (config.num_layers - 1 + 1e-5) + 1e-5
    return np.outer(layer, head).astype(np.float32)


class LightningAttention(nnx.Module):
    """output(sigmoid(gate x) * norm(heads)), heads from silu(query x), silu(key x) and silu(value x); the norm spans all heads."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        D, N, H = config.embed_dim, config.num_heads, config.head_dim
        self.block = config.lightning_block
        keys = jax.random.split(key, 5)
        self.query = param(keys[0], normal, (D, N, H), ("embed", "heads", "head_dim"))
        self.key = param(keys[1], normal, (D, N, H), ("embed", "heads", "head_dim"))
        self.value = param(keys[2], normal, (D, N, H), ("embed", "heads", "head_dim"))
        self.output = param(keys[3], normal, (N, H, D), ("heads", "head_dim", "embed"))
        self.gate = param(keys[4], normal, (D, N, H), ("embed", "heads", "head_dim"))
        self.norm = param(None, ones, (N, H), ("heads", "head_dim"))

    def __call__(self, x_BTD: jax.Array, span: Span, slope_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Output [B, T, D] and the state [B, N, H, H] of each row's last segment after these columns."""
        query, key, value = self.project(x_BTD)
        ids = (span.segment_BT, span.prefix_BT, span.index_BT)
        heads, state = lightning_attention(query, key, value, slope_N, *ids, block=self.block)
        return self.combine(heads, x_BTD), state

    def step(
        self,
        x_BTD: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        slope_N: jax.Array,
        stacked: jax.Array,
        seen_BS: jax.Array,
        layer: jax.Array,
        slot: jax.Array,
        shared: None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """One token a row: the state of its layer in the stacked memory moves on, in place in a loop's carry."""
        query, key, value = (x[:, 0].astype(jnp.float32) for x in self.project(x_BTD))
        state = jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)
        state = jnp.exp(-slope_N)[None, :, None, None] * state + key[..., :, None] * value[..., None, :]
        heads = jnp.einsum("bnh,bnhk->bnk", query, state)
        return self.combine(heads[:, None], x_BTD), jax.lax.dynamic_update_index_in_dim(stacked, state, layer, 0)

    @staticmethod
    def with_room(stacked: jax.Array, room: int) -> jax.Array:
        """The state has one size for any number of tokens."""
        return stacked

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [B, T, N, H]."""
        of = lambda w: jax.nn.silu(jnp.einsum("btd,dnh->btnh", x_BTD, w[...].astype(x_BTD.dtype)))
        return of(self.query), of(self.key), of(self.value)

    def combine(self, heads_BTNH: jax.Array, x_BTD: jax.Array) -> jax.Array:
        B, T, N, H = heads_BTNH.shape
        normed = rms_norm(heads_BTNH.reshape(B, T, N * H), self.norm[...].reshape(N * H), NORM_EPS)
        gate = jax.nn.sigmoid(jnp.einsum("btd,dnh->btnh", x_BTD, self.gate[...].astype(x_BTD.dtype)))
        heads = gate * normed.reshape(B, T, N, H).astype(x_BTD.dtype)
        return jnp.einsum("btnh,nhd->btd", heads, self.output[...].astype(x_BTD.dtype))


def lightning_attention(
    query_BTNH: jax.Array,
    key_BTNH: jax.Array,
    value_BTNH: jax.Array,
    slope_N: jax.Array,
    segment_BT: jax.Array,
    prefix_BT: jax.Array | None,
    index_BT: jax.Array,
    *,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """The sum of the module's docstring in blocks of `block` tokens: quadratic inside a block, through states from block to block.

    Args:
      segment_BT, prefix_BT: see `Span`; 0 = pad. index_BT: how many tokens of its segment and of the prefix a token sees before itself.

    Returns:
      Heads [B, T, N, H] and the state of each row's last segment after the last column, float32. The backward pass computes the blocks
      again.
    """
    B, T, N, H = query_BTNH.shape
    size = max(1, min(block, T))
    count, padding = -(-T // size), -T % size

    def blocks(x):
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)

    causal = jnp.tril(jnp.ones((size, size), bool))[None]
    decay = lambda tokens: jnp.exp(jnp.multiply.outer(jnp.maximum(tokens, 0), -slope_N))  # [..., N]

    @jax.checkpoint
    def one_block(states: tuple[_State, ...], columns):
        query, key, value, segment, index, *prefixes = columns
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        sees = lambda of: functools.reduce(jnp.logical_or, [ids == of for ids in (segment, *prefixes)]) & (of > 0)
        seen = jax.vmap(sees, in_axes=1, out_axes=2)(segment[:, :, None]) & causal
        age = (index[:, :, None] - index[:, None, :])[:, None]
        weight = jnp.where(seen[:, None], jnp.exp(-slope_N[None, :, None, None] * jnp.maximum(age, 0)), 0)
        heads = jnp.einsum("bnts,bsnh->btnh", weight * jnp.einsum("btnh,bsnh->bnts", query, key), value)
        for state in states:
            reach = jnp.where(sees(state.segment[:, None])[..., None], decay(index - state.last[:, None]), 0)
            heads = heads + jnp.einsum("btnh,bnhk->btnk", query * reach[..., None], state.sum)

        # What later blocks may see: the segment that the last token belongs to, and its prefix.
        last = jnp.max(jnp.where(segment > 0, jnp.arange(size)[None], -1), axis=1)
        of_last = lambda x: jnp.take_along_axis(x, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
        wanted = [
            jnp.where(last >= 0, of_last(x), s.segment) for x, s in zip((segment, *prefixes), states, strict=True)
        ]

        def carried(of: jax.Array) -> _State:
            """The state of segment `of` [B] after its last token up to here."""
            mine = (segment == of[:, None]) & (of > 0)[:, None]
            end = jnp.max(jnp.where(mine, index, 0), axis=1)
            for state in states:
                end = jnp.where(state.segment == of, jnp.maximum(end, state.last), end)
            left = jnp.where(mine[..., None], decay(end[:, None] - index), 0)
            total = jnp.einsum("bsnh,bsnk->bnhk", key * left[..., None], value)
            for state in states:
                keeps = jnp.where((state.segment == of)[:, None], decay(end - state.last), 0)
                total = total + keeps[..., None, None] * state.sum
            return _State(of, end, total)

        own, *other = wanted
        return (carried(own), *(carried(jnp.where(of == own, 0, of)) for of in other)), heads

    nothing = _State(*(jnp.zeros((B,), jnp.int32),) * 2, jnp.zeros((B, N, H, H), jnp.float32))
    columns = (query_BTNH, key_BTNH, value_BTNH, segment_BT, index_BT, *([] if prefix_BT is None else [prefix_BT]))
    states = (nothing,) * (1 if prefix_BT is None else 2)
    (after, *_), heads = jax.lax.scan(one_block, states, tuple(map(blocks, columns)))
    return jnp.moveaxis(heads, 0, 1).reshape(B, count * size, N, H)[:, :T], after.sum


class _State(NamedTuple):
    """What the tokens of a segment so far have left, in each row; segment 0: nothing."""

    segment: jax.Array  # [B]
    last: jax.Array  # [B], index of its last token
    sum: jax.Array  # [B, N, H, H]
