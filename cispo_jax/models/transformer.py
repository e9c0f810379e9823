"""A decoder-only transformer as a pytree: embed, scan over stacked layers, unembed.

Modules are used as plain pytrees with `jax.*` transforms; nothing inside them changes after `__init__`. The cache of the sampler is
an explicit value, in and out. `hidden_states` runs whole sequences (training, prefill), `decode_step` one token a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from cispo_jax.log_probs import head_logits
from cispo_jax.models.attention import Attention, attend
from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.layers import Mlp, normal, ones, rms_norm, rotary_angles
from cispo_jax.sharding import param


class Cache(NamedTuple):
    """Keys and values of the tokens so far: rows advance together, column = slot; `mask` says which slots hold a token."""

    key_LBSMH: jax.Array
    value_LBSMH: jax.Array
    mask_BS: jax.Array


class Block(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.eps = config.norm_eps
        self.attention_norm = param(None, ones, (config.embed_dim,), ("norm",))
        self.attention = Attention(config, key=attention_key)
        self.mlp_norm = param(None, ones, (config.embed_dim,), ("norm",))
        self.mlp = Mlp(config, key=mlp_key)

    def project(self, x_BTD: jax.Array, rotary):
        return self.attention.project(rms_norm(x_BTD, self.attention_norm[...], self.eps), rotary)

    def finish(self, x_BTD: jax.Array, heads_BTNH: jax.Array) -> jax.Array:
        with jax.named_scope("attention_output"):
            x_BTD = x_BTD + self.attention.combine(heads_BTNH)
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(rms_norm(x_BTD, self.mlp_norm[...], self.eps))


class Transformer(nnx.Module):
    """Parameters of the whole model; layers are stacked along a leading axis."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        self.config = config
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        V, D = config.vocab_size, config.embed_dim
        self.embedding = param(embed_key, normal, (V, D), ("vocab", "embed"))
        make_block = nnx.transform_metadata(
            lambda block_key: Block(config, key=block_key), in_axes=0, out_axes=0, partition=None
        )
        self.layers = jax.vmap(make_block)(jax.random.split(layers_key, config.num_layers))
        self.final_norm = param(None, ones, (D,), ("norm",))
        if not config.tied_head:
            self.head = param(head_key, normal, (D, V), ("embed", "vocab"))

    # What the sampler calls: any model with these three can be sampled, whatever its cache is.
    def head_matrix(self) -> jax.Array:
        return head_matrix(self)

    def prefill(
        self, tokens_PS: jax.Array, mask_PS: jax.Array, *, copies: int, room: int, dtype
    ) -> tuple[jax.Array, Cache]:
        return prefill(self, tokens_PS, mask_PS, copies=copies, room=room, dtype=dtype)

    def decode_step(self, token_B: jax.Array, position_B: jax.Array, cache: Cache, slot: jax.Array, *, dtype):
        return decode_step(self, token_B, position_B, cache, slot, dtype=dtype)


def head_matrix(model: Transformer) -> jax.Array:
    """The output head [D, V], float32; the transposed embedding when tied."""
    return model.embedding[...].T if model.config.tied_head else model.head[...]


def hidden_states(
    model: Transformer,
    tokens_BT: jax.Array,
    padding_mask_BT: jax.Array | None = None,
    *,
    segment_ids_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    dtype=jnp.float32,
    remat: bool = False,
    return_cache: bool = False,
):
    """Normalised hidden states [B, T, D] before the head, and with `return_cache` the stacked keys and values.

    Args:
      tokens_BT: token ids.
      padding_mask_BT: true where the token is real; padding may be left or right. None: all real.
      segment_ids_BT: packed rows; a token sees earlier tokens of its own segment only, 0 = pad.
      positions_BT: rotary positions. None: counted over the real tokens of each segment, from 0.
      dtype: compute dtype. remat: recompute layers in the backward pass.
    """
    B, T = tokens_BT.shape
    padding_mask_BT = jnp.ones((B, T), bool) if padding_mask_BT is None else padding_mask_BT.astype(bool)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((B, T), jnp.int32)
    segment_ids_BT = jnp.where(padding_mask_BT, segment_ids_BT, 0)
    if positions_BT is None:
        positions_BT = segment_positions(segment_ids_BT)
    rotary = rotary_angles(positions_BT, model.config.head_dim, model.config.rope_theta)
    same_BTS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & (segment_ids_BT > 0)[:, None, :]
    allowed_BTS = same_BTS & jnp.tril(jnp.ones((T, T), bool))[None]

    def layer(x_BTD, block: Block):
        with jax.named_scope("attention"):
            query, key, value = block.project(x_BTD, rotary)
            heads = attend(query, key, value, allowed_BTS)
        return block.finish(x_BTD, heads), (key, value) if return_cache else None

    x_BTD = model.embedding[...][tokens_BT].astype(dtype)
    x_BTD, cache = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x_BTD, model.layers)
    x_BTD = rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps)
    return (x_BTD, cache) if return_cache else x_BTD


def response_states(
    model: Transformer,
    tokens_BX: jax.Array,
    padding_mask_BX: jax.Array,
    *,
    response_width: int,
    share: int = 1,
    dtype=jnp.float32,
    remat: bool = False,
) -> jax.Array:
    """Hidden states [B, T, D] of the positions that predict the response tokens, running each shared prompt once.

    Equal to `hidden_states(...)[:, S-1:-1]`, for rows [prompt | response] of widths S + T whose prompts are equal in each run of `share`
    rows (the G responses of a group): S + G T tokens are computed in place of G (S + T). The last token is never fed.
    """
    S, T = tokens_BX.shape[1] - response_width, response_width
    mask_BX = padding_mask_BX.astype(bool)
    positions_BX = jnp.maximum(jnp.cumsum(mask_BX, axis=1) - 1, 0)
    prompt = lambda x_BX: x_BX[::share, :S]
    response = lambda x_BX: x_BX[:, S : S + T - 1]
    theta, head_dim = model.config.rope_theta, model.config.head_dim
    rotary_P, rotary_B = (rotary_angles(part(positions_BX), head_dim, theta) for part in (prompt, response))
    causal_PSS = jnp.tril(jnp.ones((S, S), bool))[None] & prompt(mask_BX)[:, None, :]
    seen_BTS = jnp.broadcast_to(mask_BX[:, None, :S], (len(mask_BX), T - 1, S))
    own_BTT = jnp.tril(jnp.ones((T - 1, T - 1), bool))[None] & response(mask_BX)[:, None, :]
    allowed_BTX = jnp.concatenate([seen_BTS, own_BTT], axis=2)

    def layer(x, block: Block):
        x_PSD, x_BTD = x
        with jax.named_scope("attention"):
            query_P, key_P, value_P = block.project(x_PSD, rotary_P)
            query_B, key_B, value_B = block.project(x_BTD, rotary_B)
            whole = lambda of_prompt, own: jnp.concatenate([jnp.repeat(of_prompt, share, axis=0), own], axis=1)
            heads_P = attend(query_P, key_P, value_P, causal_PSS)
            heads_B = attend(query_B, whole(key_P, key_B), whole(value_P, value_B), allowed_BTX)
        return (block.finish(x_PSD, heads_P), block.finish(x_BTD, heads_B)), None

    x = tuple(model.embedding[...][part(tokens_BX)].astype(dtype) for part in (prompt, response))
    (x_PSD, x_BTD), _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, model.layers)
    x_BTD = jnp.concatenate([jnp.repeat(x_PSD[:, -1:], share, axis=0), x_BTD], axis=1)
    return rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps)


def segment_positions(segment_ids_BT: jax.Array) -> jax.Array:
    """0, 1, 2, ... over the tokens of each segment; pads get 0. A segment is a run of equal ids, pads inside it apart."""
    real_BT = segment_ids_BT > 0
    count_BT = jnp.cumsum(real_BT, axis=1) - 1
    # Column of the last real token up to each column, then the id of the one before it.
    last_BT = jax.lax.cummax(jnp.where(real_BT, jnp.arange(segment_ids_BT.shape[1]), -1), axis=1)
    before_BT = jnp.pad(last_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    id_before_BT = jnp.where(before_BT >= 0, jnp.take_along_axis(segment_ids_BT, jnp.maximum(before_BT, 0), axis=1), 0)
    start_BT = jnp.where(real_BT & (segment_ids_BT != id_before_BT), count_BT, 0)
    return jnp.where(real_BT, count_BT - jax.lax.cummax(start_BT, axis=1), 0)


def forward(
    model: Transformer,
    tokens_BT: jax.Array,
    padding_mask_BT: jax.Array | None = None,
    *,
    segment_ids_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    dtype=jnp.float32,
) -> jax.Array:
    """Logits [B, T, V] in float32 of the token after each position; padding may be left or right."""
    hidden = hidden_states(
        model, tokens_BT, padding_mask_BT, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT, dtype=dtype
    )
    return head_logits(hidden, head_matrix(model))


def prefill(
    model: Transformer, tokens_PS: jax.Array, mask_PS: jax.Array, *, copies: int, room: int, dtype=jnp.float32
) -> tuple[jax.Array, Cache]:
    """Runs P prompts once and repeats each one's cache for its `copies` responses, with `room` columns for their tokens.

    Returns the hidden states [P x copies, D] of the last prompt token (prompts are left-padded) and the cache of those rows.
    """
    hidden_PSD, (keys, values) = hidden_states(model, tokens_PS, mask_PS, dtype=dtype, return_cache=True)
    grow = lambda x: jnp.pad(jnp.repeat(x, copies, axis=1), ((0, 0), (0, 0), (0, room), (0, 0), (0, 0)))
    mask_BS = jnp.pad(jnp.repeat(mask_PS, copies, axis=0), ((0, 0), (0, room)))
    return jnp.repeat(hidden_PSD[:, -1], copies, axis=0), Cache(grow(keys), grow(values), mask_BS)


def decode_step(
    model: Transformer, token_B: jax.Array, position_B: jax.Array, cache: Cache, slot: jax.Array, *, dtype=jnp.float32
) -> tuple[jax.Array, Cache]:
    """Hidden states [B, D] of one more token a row, whose key and value are written at column `slot` of the cache.

    The stacked cache is a loop carry and is updated in place; through `lax.scan`'s inputs and outputs it would be copied every token.
    """
    rotary = rotary_angles(position_B[:, None], model.config.head_dim, model.config.rope_theta)
    mask_BS = jax.lax.dynamic_update_slice(cache.mask_BS, jnp.ones((len(token_B), 1), bool), (0, slot))

    def layer(index, carry):
        x_BTD, keys, values = carry
        block = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), model.layers)
        query, key, value = block.project(x_BTD, rotary)
        keys = jax.lax.dynamic_update_slice(keys, key[None].astype(keys.dtype), (index, 0, slot, 0, 0))
        values = jax.lax.dynamic_update_slice(values, value[None].astype(values.dtype), (index, 0, slot, 0, 0))
        layer_keys, layer_values = (jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in (keys, values))
        heads = attend(query, layer_keys, layer_values, mask_BS[:, None, :])
        return block.finish(x_BTD, heads), keys, values

    x_BTD = model.embedding[...][token_B][:, None].astype(dtype)
    carry = (x_BTD, cache.key_LBSMH, cache.value_LBSMH)
    x_BTD, keys, values = jax.lax.fori_loop(0, model.config.num_layers, layer, carry)
    hidden_BD = rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps)[:, 0]
    return hidden_BD, Cache(keys, values, mask_BS)
