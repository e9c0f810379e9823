"""A decoder-only transformer as a pytree: embed, scan over stacked layers, unembed.

A layer's attention and feed-forward are chosen from two tables, `ATTENTION` and `MLP`. Layers at the same place of the period of kinds
are stacked, and one step of a loop over layers runs one period. Modules are used as plain pytrees with `jax.*` transforms; nothing
inside them changes after `__init__`. The cache of the sampler is an explicit value, in and out. `hidden_states` runs whole sequences
(training, prefill), `decode_step` one token a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from cispo_jax.log_probs import head_logits
from cispo_jax.models.attention import Attention
from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.layers import Mlp, Span, mix, normal, ones, rms_norm, rotary_angles
from cispo_jax.models.lightning import LightningAttention, slopes
from cispo_jax.models.moe import MoeMlp
from cispo_jax.sharding import param

ATTENTION: dict[str, Any] = {"softmax": Attention, "lightning": LightningAttention}
MLP: dict[str, Any] = {"dense": Mlp, "moe": MoeMlp}


class Cache(NamedTuple):
    """What attention remembers of the tokens so far, for each place of the period and stacked over its layers.

    Softmax: keys and values, column = slot, `mask` says which slots hold a token (rows advance together). Lightning: its state.
    """

    memory: tuple[Any, ...]
    mask_BS: jax.Array


class Block(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x); with `postnorm` and factors, alpha (norm x) + beta f(norm x) for either f."""

    def __init__(self, config: TransformerConfig, place: int, *, key: jax.Array):
        attention, mlp = config.kinds(place)
        attention_key, mlp_key = jax.random.split(key)
        self.eps, self.postnorm = config.norm_eps, config.postnorm
        self.attention_factors = config.softmax_residual if attention == "softmax" else config.lightning_residual
        self.mlp_factors = config.mlp_residual
        self.attention_norm = param(None, ones, (config.embed_dim,), ("norm",))
        self.attention = ATTENTION[attention](config, key=attention_key)
        self.mlp_norm = param(None, ones, (config.embed_dim,), ("norm",))
        self.mlp = MLP[mlp](config, key=mlp_key)

    def __call__(self, x_BTD: jax.Array, attend, expert_ids_BTK: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """Output [B, T, D] and what `attend(attention, normed x)` returns beside its output."""
        with jax.named_scope("attention"):
            normed = rms_norm(x_BTD, self.attention_norm[...], self.eps)
            output, memory = attend(self.attention, normed)
            x_BTD = mix(normed if self.postnorm else x_BTD, output, self.attention_factors)
        with jax.named_scope("mlp"):
            normed = rms_norm(x_BTD, self.mlp_norm[...], self.eps)
            output = self.mlp(normed, expert_ids_BTK)
            return mix(normed if self.postnorm else x_BTD, output, self.mlp_factors), memory


class Transformer(nnx.Module):
    """Parameters of the whole model: layer i is element i // period of the stack `layers[i % period]`."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        self.config = config
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        V, D = config.vocab_size, config.embed_dim
        self.embedding = param(embed_key, normal, (V, D), ("vocab", "embed"))
        layer_keys = jax.random.split(layers_key, config.num_layers)

        def stack(place):
            make_block = nnx.transform_metadata(
                lambda block_key: Block(config, place, key=block_key), in_axes=0, out_axes=0, partition=None
            )
            return jax.vmap(make_block)(layer_keys[place :: config.period])

        self.layers = nnx.List([stack(place) for place in range(config.period)])
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
    expert_ids_BTLK: jax.Array | None = None,
    dtype=jnp.float32,
    remat: bool = False,
    return_cache: bool = False,
):
    """Normalised hidden states [B, T, D] before the head, and with `return_cache` the memory of a `Cache`.

    Args:
      tokens_BT: token ids.
      padding_mask_BT: true where the token is real; padding may be left or right. None: all real.
      segment_ids_BT: packed rows; a token sees earlier tokens of its own segment (a run of equal ids) only, 0 = pad.
      positions_BT: rotary positions. None: counted over the real tokens of each segment, from 0. Lightning attention has none.
      expert_ids_BTLK: the experts to take in place of the router's choice, whose gates are computed all the same. A token with an id
        that is no expert's (the sentinel of pads) is routed anew; entries of layers without experts are not read.
      dtype: compute dtype. remat: recompute layers in the backward pass.
    """
    B, T = tokens_BT.shape
    padding_mask_BT = jnp.ones((B, T), bool) if padding_mask_BT is None else padding_mask_BT.astype(bool)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((B, T), jnp.int32)
    segment_ids_BT = jnp.where(padding_mask_BT, segment_ids_BT, 0)
    if positions_BT is None:
        positions_BT = segment_positions(segment_ids_BT)
    real_BT, start_BT = segment_ids_BT > 0, segment_starts(segment_ids_BT)
    run_BT = jnp.where(real_BT, jnp.cumsum(start_BT, axis=1), 0)  # ids may come again in a row, runs are counted
    span = Span(rotary_angles(positions_BT, model.config), run_BT, run_BT, start_BT)

    def layer(block: Block, x_BTD, slope_N, expert_ids_BTK):
        return block(x_BTD, lambda attention, x_BTD: attention(x_BTD, span, slope_N), expert_ids_BTK)

    layer = jax.checkpoint(layer) if remat else layer

    def period(x_BTD, inputs):
        memory = []
        for block, *constants in zip(*inputs, strict=True):
            x_BTD, of_layer = layer(block, x_BTD, *constants)
            memory.append(of_layer)
        return x_BTD, tuple(memory) if return_cache else None

    experts = [None] * model.config.period
    if expert_ids_BTLK is not None:
        experts = _by_place(jnp.moveaxis(expert_ids_BTLK, 2, 0), model.config)
    inputs = (list(model.layers), _by_place(slopes(model.config), model.config), experts)
    x_BTD, memory = jax.lax.scan(period, model.embedding[...][tokens_BT].astype(dtype), inputs)
    x_BTD = rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps)
    return (x_BTD, memory) if return_cache else x_BTD


def _by_place(x_L, config: TransformerConfig) -> list:
    """What differs by layer as inputs of a loop over periods, one for each place; layers are the leading axis."""
    return [x_L[place :: config.period] for place in range(config.period)]


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
    segment_BX = mask_BX[:, :-1].astype(jnp.int32)
    span_P, span_B = (
        Span(rotary_angles(part(positions_BX), model.config), part(segment_BX), seen, part(jnp.zeros_like(mask_BX)))
        for part, seen in ((prompt, prompt(segment_BX)), (response, segment_BX))
    )

    def layer(block: Block, x_PSD, x_BTD, slope_N):
        x_PSD, memory = block(x_PSD, lambda attention, x_PSD: attention(x_PSD, span_P, slope_N))
        memory = jax.tree.map(lambda x: jnp.repeat(x, share, axis=0), memory)
        x_BTD, _ = block(x_BTD, lambda attention, x_BTD: attention(x_BTD, span_B, slope_N, memory))
        return x_PSD, x_BTD

    layer = jax.checkpoint(layer) if remat else layer

    def period(x, inputs):
        for block, slope_N in zip(*inputs, strict=True):
            x = layer(block, *x, slope_N)
        return x, None

    x = tuple(model.embedding[...][part(tokens_BX)].astype(dtype) for part in (prompt, response))
    inputs = (list(model.layers), _by_place(slopes(model.config), model.config))
    (x_PSD, x_BTD), _ = jax.lax.scan(period, x, inputs)
    x_BTD = jnp.concatenate([jnp.repeat(x_PSD[:, -1:], share, axis=0), x_BTD], axis=1)
    return rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps)


def segment_starts(segment_ids_BT: jax.Array) -> jax.Array:
    """True at the first token of each segment: a run of equal ids, pads (0) inside it apart."""
    real_BT = segment_ids_BT > 0
    # Column of the last real token up to each column, then the id of the one before it.
    last_BT = jax.lax.cummax(jnp.where(real_BT, jnp.arange(segment_ids_BT.shape[1])[None], -1), axis=1)
    before_BT = jnp.pad(last_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    id_before_BT = jnp.where(before_BT >= 0, jnp.take_along_axis(segment_ids_BT, jnp.maximum(before_BT, 0), axis=1), 0)
    return real_BT & (segment_ids_BT != id_before_BT)


def segment_positions(segment_ids_BT: jax.Array) -> jax.Array:
    """0, 1, 2, ... over the tokens of each segment (see `segment_starts`); pads get 0."""
    real_BT = segment_ids_BT > 0
    count_BT = jnp.cumsum(real_BT, axis=1) - 1
    start_BT = jnp.where(segment_starts(segment_ids_BT), count_BT, 0)
    return jnp.where(real_BT, count_BT - jax.lax.cummax(start_BT, axis=1), 0)


def forward(
    model: Transformer,
    tokens_BT: jax.Array,
    padding_mask_BT: jax.Array | None = None,
    *,
    segment_ids_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    expert_ids_BTLK: jax.Array | None = None,
    dtype=jnp.float32,
) -> jax.Array:
    """Logits [B, T, V] in float32 of the token after each position; arguments: see `hidden_states`."""
    hidden = hidden_states(
        model,
        tokens_BT,
        padding_mask_BT,
        segment_ids_BT=segment_ids_BT,
        positions_BT=positions_BT,
        expert_ids_BTLK=expert_ids_BTLK,
        dtype=dtype,
    )
    return head_logits(hidden, head_matrix(model))


def prefill(
    model: Transformer, tokens_PS: jax.Array, mask_PS: jax.Array, *, copies: int, room: int, dtype=jnp.float32
) -> tuple[jax.Array, Cache]:
    """Runs P prompts once and repeats each one's cache for its `copies` responses, with `room` columns for their tokens.

    Returns the hidden states [P x copies, D] of the last prompt token (prompts are left-padded) and the cache of those rows.
    """
    hidden_PSD, memory = hidden_states(model, tokens_PS, mask_PS, dtype=dtype, return_cache=True)
    memory = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=1), memory)
    kinds = [ATTENTION[model.config.kinds(place)[0]] for place in range(model.config.period)]
    memory = tuple(kind.with_room(stacked, room) for kind, stacked in zip(kinds, memory, strict=True))
    mask_BS = jnp.pad(jnp.repeat(mask_PS, copies, axis=0), ((0, 0), (0, room)))
    return jnp.repeat(hidden_PSD[:, -1], copies, axis=0), Cache(memory, mask_BS)


def decode_step(
    model: Transformer, token_B: jax.Array, position_B: jax.Array, cache: Cache, slot: jax.Array, *, dtype=jnp.float32
) -> tuple[jax.Array, Cache]:
    """Hidden states [B, D] of one more token a row, which the cache remembers (softmax attention: at column `slot`).

    The stacked cache is a loop carry and is updated in place; through `lax.scan`'s inputs and outputs it would be copied every token.
    """
    token = jnp.ones((len(token_B), 1), bool)
    mask_BS = jax.lax.dynamic_update_slice(cache.mask_BS, token, (0, slot))
    segments = (token.astype(jnp.int32), mask_BS.astype(jnp.int32))
    span = Span(rotary_angles(position_B[:, None], model.config), *segments, jnp.zeros_like(token))
    inputs = (list(model.layers), _by_place(jnp.asarray(slopes(model.config)), model.config))

    def layer(index, block: Block, x_BTD, slope_N, stacked):
        return block(x_BTD, lambda attention, x_BTD: attention.step(x_BTD, span, slope_N, stacked, index, slot))

    def period(index, carry):
        x_BTD, memory = carry
        of_period = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), inputs)
        remembered = []
        for block, slope_N, stacked in zip(*of_period, memory, strict=True):
            x_BTD, stacked = layer(index, block, x_BTD, slope_N, stacked)
            remembered.append(stacked)
        return x_BTD, tuple(remembered)

    carry = (model.embedding[...][token_B][:, None].astype(dtype), cache.memory)
    x_BTD, memory = jax.lax.fori_loop(0, model.config.num_layers // model.config.period, period, carry)
    hidden_BD = rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps)[:, 0]
    return hidden_BD, Cache(memory, mask_BS)


class ParameterCounts(NamedTuple):
    """How many parameters a model has, and how many a token meets: of E experts, K."""

    total: int
    active: int
    embeddings: int  # of these, embedding and head; published counts of active parameters are with them (Qwen) or without (MiniMax)


def count_parameters(config: TransformerConfig) -> ParameterCounts:
    """Counts from the shapes; nothing is allocated."""
    abstract = jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0)))
    count = lambda *trees: sum(leaf.size for leaf in jax.tree.leaves(trees))
    idle = 0
    for block in abstract.layers:
        if isinstance(block.mlp, MoeMlp):
            experts = count(block.mlp.gate, block.mlp.up, block.mlp.down)
            idle += experts // config.num_experts * (config.num_experts - config.experts_per_token)
    embeddings = count(abstract.embedding) + (0 if config.tied_head else count(abstract.head))
    return ParameterCounts(count(abstract), count(abstract) - idle, embeddings)
