"""What the layers remember of the tokens so far, and how rows of it move: into slots that fell free, into fewer rows, into more columns.

The columns of softmax attention are a ring: all rows write the same column at a time, whatever their age, and `mask_BS` says which
columns hold tokens of a row. Keys carry their rotary positions with them, so that the place of a column means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cispo_jax.models.attention import KeyValues
from cispo_jax.sharding import BATCH, batch_devices, constrain

NO_EXPERT = -1  # in records of experts: of pads, and of tokens without a record


class Shared(NamedTuple):
    """The columns of P prompts, each read by its B / P responses: kept once, and multiplied by all of them together."""

    memory: tuple[Any, ...]  # of each place of the period KeyValues [L, P, S, M, H]; None of lightning attention
    mask_PS: jax.Array


class Cache(NamedTuple):
    """For each place of the period, stacked over its layers: of softmax attention keys and values, of lightning attention its state.

    Where it was asked for, the experts that each token took in each layer (`NO_EXPERT`: none).
    """

    memory: tuple[Any, ...]  # KeyValues [L, B, S, M, H] | state [L, B, N, H, H]
    mask_BS: jax.Array
    expert_ids_BSLK: jax.Array | None = None
    shared: Shared | None = None  # columns that rows have in common; those of `memory` come after them

    @property
    def num_columns(self) -> int:
        return self.mask_BS.shape[1]

    def map(self, columns: Callable, state: Callable, *others: Cache) -> tuple[Any, ...]:
        """The memory, `columns` applied to what has columns and `state` to what has not."""
        of_place = lambda x, *more: jax.tree.map(columns if isinstance(x, KeyValues) else state, x, *more)
        return tuple(map(of_place, self.memory, *(other.memory for other in others)))


def empty(like: Cache, rows: int, width: int) -> Cache:
    """A cache for the same layers without a token."""
    memory = like.map(
        lambda x: jnp.zeros((x.shape[0], rows, width, *x.shape[3:]), x.dtype),
        lambda x: jnp.zeros((x.shape[0], rows, *x.shape[2:]), x.dtype),
    )
    ids = like.expert_ids_BSLK
    ids = None if ids is None else jnp.full((rows, width, *ids.shape[2:]), NO_EXPERT, ids.dtype)
    return placed(Cache(memory, jnp.zeros((rows, width), bool), ids))


def layout(cache: Cache) -> Any:
    """The mesh axes of each array: rows over those of a batch, heads over `tensor`."""
    memory = cache.map(lambda x: P(None, BATCH, None, "tensor", None), lambda x: P(None, BATCH, "tensor", None, None))
    ids = cache.expert_ids_BSLK
    return Cache(memory, P(BATCH, None), None if ids is None else P(BATCH, None, None, None))  # type: ignore[arg-type]


def placed(cache: Cache) -> Cache:
    """In that layout, so that every program finds the one that it was compiled for."""
    return jax.tree.map(lambda x, axes: constrain(x, *axes), cache, layout(cache))


def insert(cache: Cache, prompts: Cache, source_B: jax.Array, fresh_B: jax.Array, column: jax.Array) -> Cache:
    """Row source_B of `prompts` in place of every row that is fresh, in the columns of the ring before `column`.

    The experts that prompts took are not kept.
    """
    S, W = prompts.num_columns, cache.num_columns
    columns = (column - S + jnp.arange(S)) % W
    pick = lambda new_B, old_B: jnp.where(jnp.expand_dims(fresh_B, range(1, new_B.ndim)), new_B, old_B)

    def layer_by_layer(write):
        """In place, with the copies of one layer at a time."""
        return lambda stacked, prompts: jax.lax.fori_loop(
            0, len(stacked), lambda i, x: x.at[i].set(write(x[i], prompts[i][source_B])), stacked
        )

    into_columns = lambda x_BS, new_BS: x_BS.at[:, columns].set(pick(new_BS, x_BS[:, columns]), unique_indices=True)
    memory = cache.map(layer_by_layer(into_columns), layer_by_layer(lambda old, new: pick(new, old)), prompts)
    mask_BS = into_columns(cache.mask_BS & ~fresh_B[:, None], prompts.mask_BS[source_B])
    return placed(Cache(memory, mask_BS, cache.expert_ids_BSLK))


def take_rows(cache: Cache, rows_B: jax.Array) -> Cache:
    """The given rows; on several devices each one's from its own (`take_local`)."""
    at_1 = lambda x: jax.vmap(lambda x: take_local(x, rows_B))(x)
    ids = cache.expert_ids_BSLK
    ids = None if ids is None else take_local(ids, rows_B)
    return placed(Cache(cache.map(at_1, at_1), take_local(cache.mask_BS, rows_B), ids))


def take_local(x_B: jax.Array, rows_B: jax.Array) -> jax.Array:
    """x_B[rows_B], where each share of the result comes from the same share of x: nothing is gathered between devices."""
    mesh = jax.sharding.get_abstract_mesh()
    shares = 1 if mesh.empty else batch_devices(mesh)
    split = lambda x: x.reshape(shares, -1, *x.shape[1:])
    local = split(rows_B) - jnp.arange(shares)[:, None] * (len(x_B) // shares)
    taken = jax.vmap(lambda x, rows: x[rows])(split(x_B), local)
    return taken.reshape(len(rows_B), *x_B.shape[1:])


def widen(cache: Cache, column: jax.Array, width: int) -> Cache:
    """The same with more columns; the next one to write becomes the old number of columns."""
    W = cache.num_columns
    oldest_first = (column + jnp.arange(W)) % W

    def columns(x_BW, fill):
        x_BW = jnp.take(x_BW, oldest_first, axis=1)
        more = [(0, width - W if i == 1 else 0) for i in range(x_BW.ndim)]
        return jnp.pad(x_BW, more, constant_values=fill)

    def layer_by_layer(stacked):
        """Beside the two caches, the copies of one layer at a time."""
        wide = jnp.zeros((*stacked.shape[:2], width, *stacked.shape[3:]), stacked.dtype)
        write = lambda i, x: x.at[i, :, :W].set(jnp.take(stacked[i], oldest_first, axis=1))
        return jax.lax.fori_loop(0, len(stacked), write, wide)

    ids = cache.expert_ids_BSLK
    memory = cache.map(layer_by_layer, lambda x: x)
    return placed(Cache(memory, columns(cache.mask_BS, False), None if ids is None else columns(ids, NO_EXPERT)))
