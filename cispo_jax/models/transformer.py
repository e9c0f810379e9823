"""A decoder-only transformer as a pytree: embed, scan over stacked layers, unembed.

A layer's attention and feed-forward are chosen from two tables, `ATTENTION` and `MLP`. Layers at the same place of the period of kinds
are stacked, and one step of a loop over layers runs one period. Modules are used as plain pytrees with `jax.*` transforms; nothing
inside them changes after `__init__`. The cache of the sampler is an explicit value, in and out. `hidden_states` runs whole sequences
(training, prefill), `decode_step` one token a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from cispo_jax.log_probs import head_logits
from cispo_jax.models.attention import Attention
from cispo_jax.models.cache import NO_EXPERT, Cache, Shared
from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.layers import Mlp, Span, mix, normal, ones, rms_norm, rotary_angles
from cispo_jax.models.lightning import LightningAttention, slopes
from cispo_jax.models.moe import MoeMlp, Routing
from cispo_jax.routing import RouterSums
from cispo_jax.sharding import batch_devices, constrain, param, split_rows

ATTENTION: dict[str, Any] = {"softmax": Attention, "lightning": LightningAttention}
MLP: dict[str, Any] = {"dense": Mlp, "moe": MoeMlp}


# What the backward pass of a layer computes again: nothing, all of it, or all but the products with weights.
REMAT: dict[str, Callable[[Callable], Callable]] = {
    "off": lambda layer: layer,
    "full": jax.checkpoint,
    "attention": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


class States(NamedTuple):
    """What running whole sequences gives."""

    hidden_BTD: jax.Array  # normalised, before the head
    memory: tuple[Any, ...] | None  # of a `Cache`, where it was asked for
    routing: tuple[Routing | None, ...]  # for each place of the period, stacked over its layers; None: no experts there


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

    def __call__(self, x_BTD: jax.Array, attend, *routed: jax.Array | None) -> tuple[jax.Array, Any, Routing | None]:
        """Output [B, T, D], what `attend(attention, normed x)` returns beside its output, what the router did (`routed`: its input)."""
        with jax.named_scope("attention"):
            normed = rms_norm(x_BTD, self.attention_norm[...], self.eps)
            output, memory = attend(self.attention, normed)
            x_BTD = mix(normed if self.postnorm else x_BTD, output, self.attention_factors)
        with jax.named_scope("mlp"):
            normed = rms_norm(x_BTD, self.mlp_norm[...], self.eps)
            output, routing = self.mlp(normed, *routed)
            x_BTD = mix(normed if self.postnorm else x_BTD, output, self.mlp_factors)
        return split_rows(x_BTD), memory, routing


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

    def prefill(self, tokens_PS: jax.Array, mask_PS: jax.Array, **options) -> tuple[jax.Array, Cache]:
        return prefill(self, tokens_PS, mask_PS, **options)

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
    prefix_ids_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    weight_BT: jax.Array | None = None,
    expert_ids_BTLK: jax.Array | None = None,
    dtype=jnp.float32,
    remat: str = "off",
    kernel: str = "blocks",
    return_cache: bool = False,
) -> States:
    """Whole sequences through all layers.

    Args:
      tokens_BT: token ids.
      padding_mask_BT: true where the token is real; padding may be left or right. None: all real.
      segment_ids_BT: packed rows; a token sees earlier tokens of its own segment (a run of equal ids) only, 0 = pad.
      prefix_ids_BT: the segment of the same row that a token sees besides its own, such as the prompt that several responses share; its
        own id where there is none. Then ids grow along a row, a prefix has no prefix itself, what shares one follows it directly, and
        `positions_BT` must be given: those of a segment go on from its prefix.
      positions_BT: rotary positions. None: counted over the real tokens of each segment, from 0. Lightning attention has none, but
        counts the tokens of prefixes by them.
      weight_BT: how often a token counts in the sums of the routing. None: every real one once.
      expert_ids_BTLK: the experts to take in place of the router's choice, whose gates are computed all the same. A token with an id
        that is no expert's (the sentinel of pads) is routed anew; entries of layers without experts are not read.
      dtype: compute dtype. remat: what the backward pass computes again, a key of `REMAT`. kernel: see `attention.attend`.
    """
    B, T = tokens_BT.shape
    padding_mask_BT = jnp.ones((B, T), bool) if padding_mask_BT is None else padding_mask_BT.astype(bool)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((B, T), jnp.int32)
    segment_ids_BT = jnp.where(padding_mask_BT, segment_ids_BT, 0)
    index_BT = segment_positions(segment_ids_BT)
    if prefix_ids_BT is None:
        # Ids may come again in a row: runs of them are counted.
        run_BT = jnp.where(segment_ids_BT > 0, jnp.cumsum(segment_starts(segment_ids_BT), axis=1), 0)
    elif positions_BT is None:
        raise ValueError("prefix_ids_BT needs positions_BT: those of a segment go on from its prefix")
    else:
        run_BT, index_BT = segment_ids_BT, positions_BT
    rotary = rotary_angles(index_BT if positions_BT is None else positions_BT, model.config)
    span = Span(rotary, run_BT, prefix_ids_BT, index_BT, kernel)
    weight_BT = segment_ids_BT > 0 if weight_BT is None else weight_BT

    def layer(x_BTD, inputs):
        block, slope_N, expert_ids_BTK = inputs
        attend = lambda attention, x_BTD: attention(x_BTD, span, slope_N)
        x_BTD, memory, routing = block(x_BTD, attend, weight_BT, expert_ids_BTK)
        return x_BTD, (memory if return_cache else None, routing)

    layer = REMAT[remat](layer)
    period = lambda x_BTD, inputs: _through_period(layer, x_BTD, inputs, model.config)
    experts = _replayed(expert_ids_BTLK, model.config)
    inputs = (list(model.layers), _by_place(slopes(model.config), model.config), experts)
    x_BTD, outputs = jax.lax.scan(period, embed(model, tokens_BT, dtype), inputs)
    memory, routing = zip(*outputs, strict=True)
    return States(
        rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps), memory if return_cache else None, routing
    )


def _through_period(layer, x, inputs: list, config: TransformerConfig) -> tuple[Any, list]:
    """`layer(x, inputs of a place)` from place to place; gives the last x and the outputs of each place.

    Neighbours of equal kinds run in a loop, for which their weights are put together here: a program with each of M1's 8 layers written
    out takes the TPU compiler an hour.
    """
    outputs: list = []
    for run in config.runs:
        of_places = [[of_kind[place] for of_kind in inputs] for place in run]
        if len(run) == 1:
            x, output = layer(x, of_places[0])
            outputs.append(output)
        else:
            x, stacked = jax.lax.scan(layer, x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_places))
            outputs += [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(len(run))]
    return x, outputs


def embed(model: Transformer, tokens_BT: jax.Array, dtype) -> jax.Array:
    # Each device looks its own tokens up in whole rows of the table. In its columns of the table it would look up those of all devices,
    # and the gradient would sort and add up millions of them.
    table_VD = constrain(model.embedding[...], "tensor", None)
    return split_rows(table_VD[tokens_BT].astype(dtype))


def _replayed(expert_ids_BTLK: jax.Array | None, config: TransformerConfig) -> list:
    """A selection by layer as input of a loop over periods."""
    if expert_ids_BTLK is None:
        return [None] * config.period
    return _by_place(jnp.moveaxis(expert_ids_BTLK, 2, 0), config)


def _by_place(x_L, config: TransformerConfig) -> list:
    """What differs by layer as inputs of a loop over periods, one for each place; layers are the leading axis."""
    return [x_L[place :: config.period] for place in range(config.period)]


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
    ).hidden_BTD
    return head_logits(hidden, head_matrix(model))


def prefill(
    model: Transformer,
    tokens_PS: jax.Array,
    mask_PS: jax.Array,
    *,
    copies: int,
    room: int,
    record: bool = False,
    dtype=jnp.float32,
) -> tuple[jax.Array, Cache]:
    """Runs P prompts once, for `copies` responses to each, with `room` columns for their tokens.

    Returns the hidden states [P x copies, D] of the last prompt token (prompts are left-padded) and the cache of those rows; with
    `record` it keeps the experts that each token takes. The columns of a prompt are `Shared` by its responses, where there are several
    and all lie on the device of the prompt; else each has a copy.
    """
    hidden_PSD, memory, routing = hidden_states(model, tokens_PS, mask_PS, dtype=dtype, return_cache=True)
    assert memory is not None
    mesh = jax.sharding.get_abstract_mesh()
    share = copies > 1 and (mesh.empty or len(tokens_PS) % batch_devices(mesh) == 0)
    # P prompts may be too few to be split over all devices; their P x copies responses are not.
    repeat = lambda x: split_rows(jnp.repeat(x, copies, axis=1), axis=1)
    kinds = [ATTENTION[model.config.kinds(place)[0]] for place in range(model.config.period)]
    of_prompts = tuple(x if kind is Attention else None for kind, x in zip(kinds, memory, strict=True))
    if share:
        # Softmax attention begins without a column of its own.
        memory = tuple(
            jax.tree.map(lambda x: x[:, :, :0], x) if kind is Attention else x
            for kind, x in zip(kinds, memory, strict=True)
        )
    memory = jax.tree.map(repeat, memory)
    memory = tuple(kind.with_room(stacked, room) for kind, stacked in zip(kinds, memory, strict=True))
    mask_BS = jnp.pad(jnp.repeat(mask_PS[:, : 0 if share else None], copies, axis=0), ((0, 0), (0, room)))
    expert_ids_BSLK = None
    if record:
        ids_PSLK = jnp.moveaxis(expert_ids(routing, model.config), 0, 2)
        pad = ((0, 0), (0, room), (0, 0), (0, 0))
        expert_ids_BSLK = jnp.pad(jnp.repeat(ids_PSLK, copies, axis=0), pad, constant_values=NO_EXPERT)
    hidden_BD = split_rows(jnp.repeat(hidden_PSD[:, -1], copies, axis=0))
    return hidden_BD, Cache(memory, mask_BS, expert_ids_BSLK, Shared(of_prompts, mask_PS) if share else None)


def router_sums(routing: tuple[Routing | None, ...]) -> RouterSums | None:
    """What the routers of all layers did; None without experts."""
    of_places = [r for r in routing if r is not None]
    if not of_places:
        return None
    joined = lambda name: jnp.concatenate([getattr(r, name) for r in of_places])
    replaced_LBT, load_LE = joined("replaced_BT"), joined("load_E")
    return RouterSums(
        load_LE=load_LE,
        probs_LE=joined("probs_E"),
        z_L=joined("z"),
        tokens=load_LE[0].sum() / of_places[0].expert_ids_BTK.shape[-1],
        replaced=jnp.sum(replaced_LBT, dtype=jnp.float32),
        replaced_tokens=jnp.sum(jnp.any(replaced_LBT, axis=0), dtype=jnp.float32),
        recorded_tokens=jnp.sum(joined("recorded_BT")[0], dtype=jnp.float32),
    )


def expert_ids(routing: tuple[Routing | None, ...], config: TransformerConfig) -> jax.Array:
    """The experts [L, B, T, K] that each token took in each layer; `NO_EXPERT` in layers that have none."""
    shape, dtype = next(of_place.expert_ids_BTK for of_place in routing if of_place is not None).shape, jnp.int16
    of_places = [jnp.full(shape, NO_EXPERT, dtype) if r is None else r.expert_ids_BTK for r in routing]
    return jnp.stack(of_places, axis=1).reshape(config.num_layers, *shape[1:])


def decode_step(
    model: Transformer, token_B: jax.Array, position_B: jax.Array, cache: Cache, slot: jax.Array, *, dtype=jnp.float32
) -> tuple[jax.Array, Cache]:
    """Hidden states [B, D] of one more token a row, which the cache remembers (softmax attention: at column `slot` of `memory`).

    The stacked cache is a loop carry and is updated in place; through `lax.scan`'s inputs and outputs it would be copied every token.
    """
    token = jnp.ones((len(token_B), 1), bool)
    mask_BS = jax.lax.dynamic_update_slice(cache.mask_BS, token, (0, slot))
    rotary = rotary_angles(position_B[:, None], model.config)
    inputs = (list(model.layers), _by_place(jnp.asarray(slopes(model.config)), model.config))

    shared = cache.shared
    of_prompts = (None,) * model.config.period if shared is None else shared.memory
    before = 0 if cache.expert_ids_BSLK is None else cache.expert_ids_BSLK.shape[1] - cache.num_columns  # columns

    def layer(index, place, block: Block, x_BTD, slope_N, stacked):
        prompts = None if shared is None or of_prompts[place] is None else (of_prompts[place], shared.mask_PS)
        step = lambda attention, x_BTD: attention.step(x_BTD, rotary, slope_N, stacked, mask_BS, index, slot, prompts)
        return block(x_BTD, step)

    def period(index, carry):
        x_BTD, memory, ids_BSLK = carry
        of_period = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), inputs)
        remembered = []
        for place, (block, slope_N, stacked) in enumerate(zip(*of_period, memory, strict=True)):
            x_BTD, stacked, routing = layer(index, place, block, x_BTD, slope_N, stacked)
            remembered.append(stacked)
            if ids_BSLK is not None and routing is not None:
                at = (0, before + slot, index * model.config.period + place, 0)
                ids_BSLK = jax.lax.dynamic_update_slice(ids_BSLK, routing.expert_ids_BTK[:, :, None], at)
        return x_BTD, tuple(remembered), ids_BSLK

    carry = (embed(model, token_B[:, None], dtype), cache.memory, cache.expert_ids_BSLK)
    x_BTD, *remembered = jax.lax.fori_loop(0, model.config.num_layers // model.config.period, period, carry)
    hidden_BD = rms_norm(x_BTD, model.final_norm[...], model.config.norm_eps)[:, 0]
    return hidden_BD, Cache(remembered[0], mask_BS, remembered[1], shared)


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
