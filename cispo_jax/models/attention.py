"""Grouped-query softmax attention: over whole sequences, after a remembered prompt, and one token at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.layers import Span, normal, ones, rms_norm, rotate, zeros
from cispo_jax.sharding import param


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
        return self.combine(attend(query, keys, values, span.allowed_BTS)), KeyValues(key, value)

    def step(
        self, x_BTD: jax.Array, span: Span, slope_N: jax.Array, stacked: KeyValues, layer: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, KeyValues]:
        """One token a row, written at column `slot` of its layer in the stacked memory, in place in a loop's carry."""
        query, *new = self.project(x_BTD, span.rotary)
        write = lambda x, x_BTMH: jax.lax.dynamic_update_slice(x, x_BTMH[None].astype(x.dtype), (layer, 0, slot, 0, 0))
        stacked = KeyValues(*map(write, stacked, new))
        keys, values = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in stacked)
        return self.combine(attend(query, keys, values, span.allowed_BTS)), stacked

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


def attend(query_BTNH: jax.Array, key_BSMH: jax.Array, value_BSMH: jax.Array, allowed_BTS: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the allowed keys, softmax in float32; each key head serves N/M query heads.

    A query that may see nothing (a pad) gets the mean of the values: finite, and masked by whoever reads it.
    """
    B, T, N, H = query_BTNH.shape
    M = key_BSMH.shape[2]
    query = query_BTNH.reshape(B, T, M, N // M, H)
    scores = jnp.einsum("btmgh,bsmh->bmgts", query, key_BSMH, preferred_element_type=jnp.float32) * H**-0.5
    scores = jnp.where(allowed_BTS[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(value_BSMH.dtype)
    return jnp.einsum("bmgts,bsmh->btmgh", weights, value_BSMH).reshape(B, T, N, H)
