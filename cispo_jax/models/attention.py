"""Grouped-query softmax attention: over whole sequences, after a remembered prompt, and one token at a time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.layers import Span, normal, ones, rms_norm, rotate, zeros
from cispo_jax.sharding import param

# Tokens of a block of queries and of keys: 4 MiB of scores a head. Smaller ones read and write the running sums more often.
BLOCK = 1024


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

    def __call__(
        self, x_BTD: jax.Array, span: Span, slope_N: jax.Array, memory: KeyValues | None = None
    ) -> tuple[jax.Array, KeyValues]:
        """Output [B, T, D] and the keys and values of these columns; `memory` holds those of the columns before."""
        query, key, value = self.project(x_BTD, span.rotary)
        keys, values = key, value
        if memory is not None:
            keys, values = (jnp.concatenate(parts, axis=1) for parts in zip(memory, (key, value), strict=True))
        return self.combine(attend(query, keys, values, span.segment_BT, span.segment_BS)), KeyValues(key, value)

    def step(
        self, x_BTD: jax.Array, span: Span, slope_N: jax.Array, stacked: KeyValues, layer: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, KeyValues]:
        """One token a row, written at column `slot` of its layer in the stacked memory, in place in a loop's carry."""
        query, *new = self.project(x_BTD, span.rotary)
        write = lambda x, x_BTMH: jax.lax.dynamic_update_slice(x, x_BTMH[None].astype(x.dtype), (layer, 0, slot, 0, 0))
        stacked = KeyValues(*map(write, stacked, new))
        keys, values = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in stacked)
        return self.combine(attend(query, keys, values, span.segment_BT, span.segment_BS)), stacked

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
    key_BSMH: jax.Array,
    value_BSMH: jax.Array,
    segment_BT: jax.Array,
    segment_BS: jax.Array,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the keys that a query sees, softmax in float32; each key head serves N/M query heads.

    The T queries stand at the last T of the S columns and see the keys of their own segment up to their own column. With more than
    `block` x `block` scores a head it goes block by block, forward and backward, so that memory grows with T + S, not with T x S.
    """
    B, T, N, H = query_BTNH.shape
    S, M = key_BSMH.shape[1:3]
    query = query_BTNH.reshape(B, T, M, N // M, H)
    with jax.named_scope("attend"):
        if block * block >= T * S:
            scores = _scores(query, key_BSMH, segment_BT, segment_BS, jnp.arange(S - T, S), jnp.arange(S))
            weights = jax.nn.softmax(scores, axis=-1).astype(value_BSMH.dtype)
            return jnp.einsum("bmgts,bsmh->btmgh", weights, value_BSMH).reshape(B, T, N, H)
        # Columns that fill the last block: as queries nobody reads them, as keys nobody sees segment -1.
        fill = lambda x, value=0: jnp.pad(
            x, ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2)), constant_values=value
        )
        arrays = fill(query), fill(key_BSMH), fill(value_BSMH), fill(segment_BT, -2), fill(segment_BS, -1)
        return _blockwise(block, S - T, *arrays)[:, :T].reshape(B, T, N, H)


def _scores(query, key, segment_BT, segment_BS, column_T, column_S) -> jax.Array:
    """[B, M, G, T, S] in float32, as good as minus infinity where a query does not see a key."""
    scores = jnp.einsum("btmgh,bsmh->bmgts", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    seen = (segment_BT[:, :, None] == segment_BS[:, None, :]) & (column_T[:, None] >= column_S[None, :])[None]
    return jnp.where(seen[:, None, None], scores, -1e30)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(size: int, offset: int, query, key, value, segment_BT, segment_BS) -> jax.Array:
    """FlashAttention (arXiv:2205.14135) in plain operations; query t stands at column `offset` + t, lengths are multiples of `size`."""
    return _blockwise_forward(size, offset, query, key, value, segment_BT, segment_BS)[0]


def _blockwise_forward(size: int, offset: int, query, key, value, segment_BT, segment_BS):
    (B, T, M, G, H), S = query.shape, key.shape[1]
    scores_of = functools.partial(_block_scores, size, offset, query, key, segment_BT, segment_BS)

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

        start = (jnp.full((B, M, G, size), -1e30), jnp.zeros((B, M, G, size)), jnp.zeros((B, M, G, size, H)))
        # Later keys are not seen. The loop's length depends on i; the backward pass below does not differentiate it.
        seen = jnp.minimum((offset + (i + 1) * size - 1) // size + 1, S // size)
        highest, total, weighted = jax.lax.fori_loop(0, seen, add, start)
        return (weighted / total[..., None]).astype(value.dtype), highest + jnp.log(total)

    output, log_total = jax.lax.map(one_block, jnp.arange(T // size))
    output = jnp.moveaxis(output, (0, 4), (1, 2)).reshape(B, T, M, G, H)
    return output, (query, key, value, segment_BT, segment_BS, output, log_total)


def _blockwise_backward(size: int, offset: int, residuals, cotangent):
    query, key, value, segment_BT, segment_BS, output, log_total = residuals
    T, H = query.shape[1], query.shape[-1]
    scores_of = functools.partial(_block_scores, size, offset, query, key, segment_BT, segment_BS)
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
        first = jnp.maximum(j * size - offset, 0) // size
        query_gradient, *gradients = jax.lax.fori_loop(first, T // size, add, start)
        return query_gradient, [g.astype(x.dtype) for g, x in zip(gradients, (key, value), strict=True)]

    query_gradient, gradients = jax.lax.scan(
        one_block, jnp.zeros(query.shape, jnp.float32), jnp.arange(key.shape[1] // size)
    )
    gradients = [jnp.moveaxis(g, 0, 1).reshape(key.shape) for g in gradients]
    no_gradient = [np.zeros(x.shape, jax.dtypes.float0) for x in (segment_BT, segment_BS)]
    return query_gradient.astype(query.dtype), *gradients, *no_gradient


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _block_scores(size: int, offset: int, query, key, segment_BT, segment_BS, i, j) -> jax.Array:
    """Scores of block i of the queries against block j of the keys."""
    of_i, of_j = ([_block(x, n, size) for x in pair] for n, pair in ((i, (query, segment_BT)), (j, (key, segment_BS))))
    columns = jnp.arange(size)
    return _scores(of_i[0], of_j[0], of_i[1], of_j[1], offset + i * size + columns, j * size + columns)


def _block(x: jax.Array, index, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
