"""How tokens reach their experts and come back, on one device or over a mesh; none is ever dropped.

On a device: tokens sorted by expert, one grouped product, the results back in their places (`local_experts`). Over a mesh the experts
are split over the axis `expert`, as are the rows of the batch: each device sends every token to the device of each of its experts and
gets the results back (`exchanged_experts`). `dense_experts` in `moe.py` is the plain reference of both.

The buffers are bounded without a capacity: a device exchanges a chunk of its tokens at a time, so few that all of them from all devices
would fit if they chose the same device (`chunk_tokens`). Imbalance costs time, never memory or tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cispo_jax.models.layers import swiglu
from cispo_jax.sharding import AXES, BATCH

BUFFER_ROWS = 65_536  # rows of one exchange buffer; at D = 6,144 in bfloat16 0.8 GB
MAX_BLOCK = 128  # rows of one product on CPU: below, XLA's matrix product loses speed; above, padding costs more


class Experts(NamedTuple):
    """Weights of the experts' SwiGLU, or something for each of them."""

    gate_EDF: Any
    up_EDF: Any
    down_EFD: Any


def expert_outputs(experts: Experts, tokens_TD: jax.Array, gates_TK: jax.Array, expert_ids_TK: jax.Array) -> jax.Array:
    """The gated sum of the chosen experts' outputs, [T, D]; an id below 0 chooses none (a pad costs nothing).

    Under a mesh (`jax.set_mesh`) the tokens are split over all its batch axes and the weights as `cispo_jax.sharding.RULES` says.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes or set(AXES) - set(mesh.axis_names):
        return local_experts(experts, tokens_TD, gates_TK, expert_ids_TK)
    T = len(tokens_TD)
    padding = -T % _size(mesh, BATCH)
    pad = lambda x, value: jnp.pad(x, ((0, padding), (0, 0)), constant_values=value)
    rows, columns = P(BATCH, None), P("expert", "fsdp", "tensor")
    exchanged = jax.shard_map(
        exchanged_experts,
        in_specs=(Experts(columns, columns, P("expert", "tensor", "fsdp")), rows, rows, rows),
        out_specs=rows,
    )
    return exchanged(experts, pad(tokens_TD, 0), pad(gates_TK, 0), pad(expert_ids_TK, -1))[:T]


def local_experts(experts: Experts, tokens_TD: jax.Array, gates_TK: jax.Array, expert_ids_TK: jax.Array) -> jax.Array:
    """`expert_outputs` where every expert is at hand."""
    E, T, D, K = len(experts.gate_EDF), *tokens_TD.shape, gates_TK.shape[1]
    chosen = jnp.where(expert_ids_TK < 0, E, expert_ids_TK).reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    outputs = grouped_swiglu(tokens_TD[order // K], count(chosen, E), experts)
    outputs = jnp.zeros((T * K, D), outputs.dtype).at[order].set(outputs, unique_indices=True)
    return combine(outputs, gates_TK)


def combine(outputs: jax.Array, gates_TK: jax.Array) -> jax.Array:
    """Sum of gate x output over each token's K rows of `outputs` [T x K, D], in float32."""
    outputs_TKD = outputs.reshape(*gates_TK.shape, outputs.shape[-1]).astype(jnp.float32)
    return jnp.sum(gates_TK[..., None] * outputs_TKD, axis=1).astype(outputs.dtype)


def count(chosen: jax.Array, E: int) -> jax.Array:
    """How often each of E numbers occurs; other numbers are not counted."""
    return jnp.sum(chosen[:, None] == jnp.arange(E)[None], axis=0, dtype=jnp.int32)


# ---------------------------------------------------------------------------------------------------------------------
# Over a mesh


def exchanged_experts(
    experts: Experts, tokens_TD: jax.Array, gates_TK: jax.Array, expert_ids_TK: jax.Array
) -> jax.Array:
    """`expert_outputs` on one device of a mesh: its rows, its share of the experts, of their D (fsdp) and of their F (tensor)."""
    # Values of one device each from here on; how they were shared is undone in the backward pass by the sum over devices.
    inputs = jax.tree.map(_vary, (experts, tokens_TD, gates_TK, expert_ids_TK))
    experts, tokens_TD, gates_TK, expert_ids_TK = inputs
    dtype, axes = tokens_TD.dtype, Experts(1, 1, 2)
    gather = lambda w, axis: jax.lax.all_gather(w.astype(dtype), "fsdp", axis=axis, tiled=True)
    # Back to float32 (without a change of value), so that the chunks' gradients are added up in it.
    experts = Experts(*(gather(w, axis).astype(jnp.float32) for w, axis in zip(experts, axes, strict=True)))

    T = len(tokens_TD)
    size = min(T, chunk_tokens(jax.lax.axis_size("expert"), len(experts.gate_EDF), gates_TK.shape[1]))
    padding = -T % size
    chunks = [
        jnp.pad(x, ((0, padding), (0, 0)), constant_values=value).reshape(-1, size, x.shape[1])
        for x, value in ((tokens_TD, 0), (gates_TK, 0), (expert_ids_TK, -1))
    ]
    one = jax.checkpoint(lambda chunk: _exchange_chunk(jax.tree.map(lambda w: w.astype(dtype), experts), *chunk))
    outputs = one([x[0] for x in chunks])[None] if size >= T else jax.lax.map(one, chunks)
    return jax.lax.psum(outputs.reshape(-1, outputs.shape[-1])[:T], "tensor")


def chunk_tokens(devices: int, experts_of_device: int, experts_per_token: int) -> int:
    """Tokens that each device exchanges at a time: every token of every device may choose as many experts of one device as there are."""
    return max(1, BUFFER_ROWS // (devices * min(experts_per_token, experts_of_device)))


def _exchange_chunk(experts: Experts, tokens_TD: jax.Array, gates_TK: jax.Array, expert_ids_TK: jax.Array) -> jax.Array:
    devices, mine, K = jax.lax.axis_size("expert"), len(experts.gate_EDF), gates_TK.shape[1]
    E, rows = devices * mine, gates_TK.size
    chosen = jnp.where(expert_ids_TK < 0, E, expert_ids_TK).reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    # counts[s, d, e]: rows that device s sends to the e-th expert of device d.
    counts = jax.lax.all_gather(count(chosen, E).reshape(devices, mine), "expert")
    sizes = counts.sum(axis=2)
    room = devices * len(tokens_TD) * min(K, mine)
    received = exchange(tokens_TD[order // K], sizes, room)
    # They come sorted by sender, then by expert: to sort by expert is to know each row's.
    here = counts[:, jax.lax.axis_index("expert")]
    expert = jnp.searchsorted(jnp.cumsum(here.reshape(-1)), jnp.arange(room), side="right") % mine
    expert = jnp.where(jnp.arange(room) < here.sum(), expert, mine)
    by_expert = jnp.argsort(expert, stable=True)
    outputs = grouped_swiglu(received[by_expert], here.sum(axis=0), experts)
    outputs = jnp.zeros_like(outputs).at[by_expert].set(outputs, unique_indices=True)
    returned = exchange(outputs, sizes.T, rows)
    returned = jnp.zeros_like(returned).at[order].set(returned, unique_indices=True)
    return combine(returned, gates_TK)


def exchange(rows: jax.Array, sizes: jax.Array, room: int) -> jax.Array:
    """Sends each device of the axis `expert` its rows: `sizes[s, d]` from device s to device d; senders keep theirs sorted by receiver.

    Returns [room, ...]: what came, sorted by sender and in the sender's order, then zeros. TPU and GPU send these rows only
    (`jax.lax.ragged_all_to_all`); CPU has no such operation and gathers those of all devices.
    """
    me = jax.lax.axis_index("expert")
    before = lambda x, axis: jnp.cumsum(x, axis=axis) - x
    starts = before(sizes, 1)  # of each receiver's rows at each sender
    if platform() == "cpu":
        everything = jax.lax.all_gather(rows, "expert")
        ends = jnp.cumsum(sizes[:, me])
        index = jnp.arange(room)
        sender = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(ends) - 1)
        place = starts[sender, me] + index - (ends - sizes[:, me])[sender]
        came = (index < ends[-1]).reshape(-1, *(1,) * (rows.ndim - 1))
        return jnp.where(came, everything[sender, jnp.where(index < ends[-1], place, 0)], 0)
    return jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros_like(rows, shape=(room, *rows.shape[1:])),
        starts[me],
        sizes[me],
        before(sizes, 0)[me],
        sizes[:, me],
        axis_name="expert",
    )


# ---------------------------------------------------------------------------------------------------------------------
# On one device


def grouped_swiglu(rows_RD: jax.Array, sizes_E: jax.Array, experts: Experts) -> jax.Array:
    """Rows sorted by expert, `sizes_E` of each, through their expert's SwiGLU; rows after the last group give 0."""
    if platform() == "cpu":
        # ragged_dot multiplies every row by every expert there.
        weights = Experts(*(w.astype(rows_RD.dtype) for w in experts))
        return _blocked_swiglu(block_rows(len(rows_RD), len(sizes_E)), rows_RD, sizes_E, weights)
    real_R = (jnp.arange(len(rows_RD)) < sizes_E.sum())[:, None]
    rows_RD = jnp.where(real_R, rows_RD, 0)
    dot = lambda x, w: jax.lax.ragged_dot(x, w.astype(x.dtype), sizes_E)
    gate, up = dot(rows_RD, experts.gate_EDF), dot(rows_RD, experts.up_EDF)
    hidden = jnp.where(
        real_R, jax.nn.silu(gate) * up, 0
    )  # what lies after the last group may be anything, NaN included
    return jnp.where(real_R, dot(hidden, experts.down_EFD), 0)


def block_rows(rows: int, groups: int) -> int:
    """Rows of one block: about those of a group, a power of two from 8 to `MAX_BLOCK`."""
    return min(MAX_BLOCK, max(8, 1 << (max(1, rows // groups) - 1).bit_length()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_swiglu(block: int, rows_RD: jax.Array, sizes_E: jax.Array, experts: Experts) -> jax.Array:
    """`block` rows of one expert at a time; exact for any sizes. A group's last block reads on into the next group's rows, as zeros."""
    return _blocked_forward(block, rows_RD, sizes_E, experts)[0]


def _blocked_forward(block: int, rows_RD: jax.Array, sizes_E: jax.Array, experts: Experts):
    table = _blocks(block, len(rows_RD), sizes_E)
    padded = jnp.pad(rows_RD, ((0, block), (0, 0)))

    def one(i, outputs):
        expert, start, real = (x[i] for x in table)
        x = _block(padded, start, real, block)
        # Zeros beyond the group's end: the next block, which begins there, writes over them.
        return jax.lax.dynamic_update_slice(outputs, swiglu(x, *(w[expert] for w in experts)), (start, 0))

    outputs = jax.lax.fori_loop(0, _used(block, sizes_E), one, _zeros(padded))
    return outputs[: len(rows_RD)], (rows_RD, sizes_E, experts)


def _blocked_backward(block: int, residuals, cotangent_RD: jax.Array):
    rows_RD, sizes_E, experts = residuals
    table = _blocks(block, len(rows_RD), sizes_E)
    padded, cotangents = (jnp.pad(x, ((0, block), (0, 0))) for x in (rows_RD, cotangent_RD))

    def one(i, gradients):
        d_rows, d_experts = gradients
        expert, start, real = (x[i] for x in table)
        x, cotangent = (_block(whole, start, real, block) for whole in (padded, cotangents))
        _, pull = jax.vjp(swiglu, x, *(w[expert] for w in experts))
        d_x, *d_weights = pull(cotangent)
        d_rows = jax.lax.dynamic_update_slice(d_rows, d_x, (start, 0))
        return d_rows, Experts(*(d.at[expert].add(new) for d, new in zip(d_experts, d_weights, strict=True)))

    zeros = (_zeros(padded), Experts(*map(_zeros, experts)))
    d_rows, d_experts = jax.lax.fori_loop(0, _used(block, sizes_E), one, zeros)
    return d_rows[: len(rows_RD)], None, d_experts


_blocked_swiglu.defvjp(_blocked_forward, _blocked_backward)


def _blocks(block: int, rows: int, sizes_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of every possible block: its expert, its first row, how many of its rows are the expert's."""
    of_expert = -(-sizes_E // block)
    ends = jnp.cumsum(of_expert)
    index = jnp.arange(rows // block + len(sizes_E))
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(sizes_E) - 1)
    within = (index - (ends - of_expert)[expert]) * block
    start = (jnp.cumsum(sizes_E) - sizes_E)[expert] + within
    return expert, start, jnp.minimum(sizes_E[expert] - within, block)


def _used(block: int, sizes_E: jax.Array) -> jax.Array:
    return jnp.sum(-(-sizes_E // block))


def _block(padded: jax.Array, start: jax.Array, real: jax.Array, block: int) -> jax.Array:
    rows = jax.lax.dynamic_slice(padded, (start, 0), (block, padded.shape[1]))
    return jnp.where((jnp.arange(block) < real)[:, None], rows, 0)


def _zeros(x: jax.Array) -> jax.Array:
    zeros = jnp.zeros_like(x)
    missing = tuple(_varying(x) - _varying(zeros))
    return jax.lax.pcast(zeros, missing, to="varying") if missing else zeros


# ---------------------------------------------------------------------------------------------------------------------
# Meshes


def platform() -> str:
    """What the program will run on: that of the mesh it is traced under, which may be compiled for without being at hand."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _size(mesh: jax.sharding.AbstractMesh, axes: Sequence[str]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def _varying(x: jax.Array) -> frozenset[str]:
    """Inside `jax.shard_map`, the mesh axes along which the devices may hold different values."""
    return jax.typeof(x).manual_axis_type.varying


def _vary(x: jax.Array) -> jax.Array:
    """The same value, as one that may differ along every axis of the mesh."""
    missing = tuple(axis for axis in AXES if axis not in _varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
