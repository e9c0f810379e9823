"""Continuous batching: responses of different ages decode together, and one that ends hands its slot to the next.

The host looks at the slots every `sync_tokens` tokens, or as soon as enough of them are free; in between nothing travels. A prompt is
prefilled once, less its last token, and copied into the slots of its responses, which begin by feeding that token. When no response
waits any more, the rows that still run move together; the cache gets more columns with the oldest row. The same tokens come out as from
the plain loop (`decode.py`): a token's key is a function of (seed, step, prompt id, sample, position).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax.config import ConfigError
from cispo_jax.distributed import settle, to_host
from cispo_jax.log_probs import head_logits
from cispo_jax.models import cache as caches
from cispo_jax.models.cache import NO_EXPERT, Cache
from cispo_jax.sampling.draw import RUNNING, STOP, Choice, Rows, Rules, row_keys
from cispo_jax.sharding import BATCH, batch_devices, constrain
from cispo_jax.types import Progress

FACTOR = 4  # from one number of rows or of columns to the next: every one is a compilation
FIRST_ROOM = 1024  # columns for tokens of responses in the smallest cache
LEAST_ROWS = 4  # on each device


class Slots(NamedTuple):
    """B responses that decode together, on the device; a row whose reason is not RUNNING is free."""

    rows: Rows
    prompt_id_B: jax.Array  # uint32; with the sample, what the randomness of the row depends on
    sample_B: jax.Array
    cache: Cache


def sample(
    model: Any,
    tokens_PS: np.ndarray,
    mask_PS: np.ndarray,
    ids_P: np.ndarray,
    rules: Rules,
    *,
    group_size: int,
    max_new_tokens: int,
    slots: int,
    sync_tokens: int,
    on_sync: Callable[[Progress], None] | None,
    shard_rows: Callable[[np.ndarray], jax.Array],
    **static: Any,
) -> tuple[Any, ...]:
    """What `decode._sample` returns, on the host; see `sample_groups`."""
    total = len(tokens_PS) * group_size
    devices = _devices()
    if slots % devices:
        raise ConfigError(f"slots={slots}: valid are multiples of the {devices} devices that split rows.")
    slots = min(slots, -(-total // devices) * devices)
    run = _Run(
        model, (tokens_PS, mask_PS, ids_P), rules, group_size, max_new_tokens, slots, sync_tokens, shard_rows, static
    )
    while run.fill():
        run.shrink_or_widen()
        ended = run.decode()
        if on_sync is not None:
            on_sync(Progress(ended, run.lengths, run.tokens, run.reasons))
    return run.tokens, run.mask, run.log_probs, run.reasons, run.expert_ids


def row_sizes(slots: int, devices: int = 1) -> list[int]:
    """How many rows may decode together: all slots, and fewer when responses have ended and none waits."""
    sizes = [slots]
    while sizes[-1] // devices // FACTOR >= LEAST_ROWS:
        sizes.append(sizes[-1] // devices // FACTOR * devices)
    return sizes


def widths(prompt_width: int, max_new_tokens: int) -> list[int]:
    """How many columns a cache may have: enough for the longest response, and fewer while all are young."""
    rooms = [max_new_tokens]
    while rooms[0] >= 2 * FIRST_ROOM:
        rooms.insert(0, max(-(-rooms[0] // FACTOR), FIRST_ROOM))
    return [_prompt_columns(prompt_width) + room for room in rooms]


def prompts_at_a_time(prompts: int, group_size: int, slots: int, devices: int = 1) -> int:
    """How many are prefilled together; the last ones are filled up with others."""
    return -(-min(prompts, -(-slots // group_size)) // devices) * devices


def bytes_of_row(model: Any, prompt_width: int, max_new_tokens: int, dtype: str, record: bool = False) -> int:
    """The cache of one response at its longest, of all heads."""
    one = jax.ShapeDtypeStruct((1, prompt_width), jnp.int32)
    prefill = functools.partial(_prefill, dtype=dtype, record=record)
    prompts = jax.eval_shape(prefill, model, one, jax.ShapeDtypeStruct(one.shape, bool))
    cache = jax.eval_shape(lambda: caches.empty(prompts, 1, widths(prompt_width, max_new_tokens)[-1]))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


class _Run:
    """One rollout: the responses so far, which of them has which slot, and the slots."""

    def __init__(
        self, model: Any, prompts: tuple[np.ndarray, ...], rules: Rules, group_size: int, max_new_tokens: int, slots: int,
        sync_tokens: int, shard_rows: Callable[[np.ndarray], jax.Array], static: dict[str, Any],
    ):  # fmt: skip
        self.model, self.rules, self.G, self.sync_tokens = model, rules, group_size, sync_tokens
        self.shard_rows, self.static, self.devices = shard_rows, static, _devices()
        self.prompt_tokens, self.prompt_mask, self.prompt_ids = prompts
        (P, S), T = self.prompt_tokens.shape, max_new_tokens
        self.total, self.waiting = P * group_size, 0  # responses, and the first of them that has not begun
        self.tokens, self.mask, self.log_probs = (np.zeros((self.total, T), x) for x in (np.int32, bool, np.float32))
        self.lengths, self.reasons = np.zeros(self.total, int), np.full(self.total, RUNNING, np.int8)
        self.owner = np.full(slots, -1)  # the response in each slot; -1: free
        self.row_sizes, self.widths = row_sizes(slots, self.devices), widths(S, T)
        self.column, self.width = 0, self.widths[0]
        self.batch = prompts_at_a_time(P, group_size, slots, self.devices)
        self.first, self.prefilled = 0, self._prefill(0)
        ids = self.prefilled.expert_ids_BSLK
        self.expert_ids = None if ids is None else np.full((self.total, S + T, *ids.shape[2:]), NO_EXPERT, ids.dtype)
        self._record_prompts()
        self._compile_every_size()
        self.slots = settle(_empty(self.prefilled, rows=slots, width=self.width))

    @property
    def running(self) -> np.ndarray:
        return self.owner >= 0

    def fill(self) -> bool:
        """Every free slot takes the next response; False when none is left that runs."""
        while self.waiting < self.total and not self.running.all():
            if self.waiting >= (self.first + self.batch) * self.G:
                self.first = self.waiting // self.G
                self.prefilled = self._prefill(self.first)
                self._record_prompts()
            end = min(self.total, (self.first + self.batch) * self.G)
            free = np.flatnonzero(~self.running)[: end - self.waiting]
            self.owner[free] = np.arange(self.waiting, self.waiting + len(free))
            self.waiting += len(free)
            fresh_B = np.isin(np.arange(len(self.owner)), free)
            prompt_B, sample_B = divmod(np.maximum(self.owner, 0), self.G)
            columns_B = (
                np.where(fresh_B, prompt_B - self.first, 0).astype(np.int32),
                fresh_B,
                self.prompt_tokens[prompt_B, -1],
                self.prompt_mask[prompt_B].sum(axis=1).astype(np.int32) - 1,
                self.prompt_ids[prompt_B],
                sample_B.astype(np.uint32),
            )
            self.slots = settle(
                _insert(self.slots, self.prefilled, np.int32(self.column), *map(self.shard_rows, columns_B))
            )
        return bool(self.running.any())

    def _prefill(self, first: int) -> Cache:
        """Runs the prompts from the given one on."""
        at = np.arange(first, first + self.batch) % len(self.prompt_ids)
        options = {name: self.static[name] for name in ("dtype", "record")}
        prompts = (self.shard_rows(x[at]) for x in (self.prompt_tokens, self.prompt_mask))
        return settle(_prefill(self.model, *prompts, **options))

    def _record_prompts(self) -> None:
        """The experts that the tokens of the prefilled prompts took, for all of their responses."""
        if self.expert_ids is not None:
            columns = self.prompt_tokens.shape[1] - 1
            rows = np.arange(self.first * self.G, min((self.first + self.batch) * self.G, self.total))
            ids = to_host(self.prefilled.expert_ids_BSLK)[rows // self.G - self.first, :columns]
            self.expert_ids[rows, :columns] = ids

    def shrink_or_widen(self) -> None:
        """Moves rows together where that many fewer are left, and makes room for the next token of the oldest."""
        for size in self.row_sizes[1:]:
            share = self.running.reshape(self.devices, -1)
            if self.waiting < self.total or size >= len(self.owner) or share.sum(axis=1).max() > size // self.devices:
                continue
            # Each device keeps rows of its own, those that run first.
            order = np.argsort(~share, axis=1, kind="stable")[:, : size // self.devices]
            keep = (order + np.arange(self.devices)[:, None] * share.shape[1]).reshape(-1)
            self.owner = self.owner[keep]
            self.slots = settle(_take(self.slots, self.shard_rows(keep.astype(np.int32))))
        if not self.room:
            wider = self.widths[self.widths.index(self.width) + 1]
            self.slots = settle(_widen(self.slots, np.int32(self.column), width=wider))
            self.column, self.width = self.width, wider

    @property
    def room(self) -> int:
        """Columns that can be written before the first one of the oldest row."""
        oldest = self.lengths[self.owner[self.running]].max()
        return int(self.width - _prompt_columns(self.prompt_tokens.shape[1]) - oldest)

    def decode(self) -> np.ndarray:
        """More tokens of every row that runs, until some have ended or for `sync_tokens` tokens; the responses that have ended."""
        B, running = len(self.owner), self.running.sum()
        few = max(1, B // 8)
        until = running - few  # rows that run when it is time to fill free slots, ...
        if self.waiting == self.total:  # ... or to move the rest together
            until = next((size for size in self.row_sizes if size < running), 0)
        limit = np.int32(min(self.sync_tokens, self.room))
        self.slots, drawn, reason_B, ids = self._decode(self.slots, limit, np.int32(until))
        tokens, ran, log_probs = map(to_host, drawn)
        reasons, ids = to_host(reason_B), None if ids is None else to_host(ids)
        for slot in np.flatnonzero(self.running):
            row, count = self.owner[slot], int(ran[slot].sum())
            start = self.lengths[row]
            new = slice(start, start + count)
            self.lengths[row] += count
            self.tokens[row, new], self.mask[row, new] = tokens[slot, :count], True
            self.log_probs[row, new], self.reasons[row] = log_probs[slot, :count], reasons[slot]
            if self.expert_ids is not None and ids is not None:
                # The token before each one was fed, at first the last of the prompt.
                first = self.prompt_tokens.shape[1] - 1 + start
                self.expert_ids[row, first : first + count] = ids[slot, :count]
        self.column = (self.column + int(ran.any(axis=0).sum())) % self.width
        ended = np.flatnonzero(self.running & (reasons != RUNNING))
        responses = self.owner[ended]
        self.owner[ended] = -1
        return responses

    def _decode(self, slots: Slots, limit, until):
        options = {"columns": self.sync_tokens, **self.static}
        return settle(_decode(self.model, slots, np.int32(self.column), limit, until, self.rules, **options))

    def _compile_every_size(self) -> None:
        """Runs every program once for nothing, so that none is compiled in the middle of a later rollout."""
        arrays = tuple((x.shape, x.dtype) for x in jax.tree.leaves((self.model, self.prefilled, self.rules)))
        sizes = (len(self.owner), tuple(self.widths), self.sync_tokens)
        key = (arrays, sizes, tuple(sorted(self.static.items())), jax.sharding.get_abstract_mesh())
        if key in _COMPILED:
            return
        _COMPILED.add(key)
        B, zero = len(self.owner), np.int32(0)
        for width, wider in zip(self.widths, [*self.widths[1:], 0], strict=True):
            for rows, fewer in zip(self.row_sizes, [*self.row_sizes[1:], 0], strict=True):
                slots = settle(_empty(self.prefilled, rows=rows, width=width))
                if rows == B:
                    nothing = (np.zeros(B, x) for x in (np.int32, bool, np.int32, np.int32, np.uint32, np.uint32))
                    slots = settle(_insert(slots, self.prefilled, zero, *map(self.shard_rows, nothing)))
                slots, *_ = self._decode(slots, zero, zero)
                if fewer:
                    settle(_take(slots, self.shard_rows(np.arange(fewer, dtype=np.int32))))
                if wider:
                    settle(_widen(slots, zero, width=wider))


_COMPILED: set[tuple] = set()


def _devices() -> int:
    """How many ways rows are split, under the mesh at hand."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else batch_devices(mesh)


def _prompt_columns(prompt_width: int) -> int:
    return max(prompt_width - 1, 1)  # the last token is fed by each response; of prompts of one token a pad is left


# ---- on the device


@functools.partial(jax.jit, static_argnames=("dtype", "record"))
def _prefill(model, tokens_PS, mask_PS, *, dtype, record) -> Cache:
    """The cache of P prompts without their last tokens."""
    columns = _prompt_columns(tokens_PS.shape[1])
    mask_PS = mask_PS.at[:, -1].set(False)
    options = {"record": True} if record else {}
    _, cache = model.prefill(
        tokens_PS[:, :columns], mask_PS[:, :columns], copies=1, room=0, dtype=jnp.dtype(dtype), **options
    )
    return caches.placed(cache)


@functools.partial(jax.jit, static_argnames=("rows", "width"))
def _empty(prompts: Cache, *, rows: int, width: int) -> Slots:
    zeros_B = _split(jnp.zeros(rows, jnp.int32))
    free_B = _split(jnp.full(rows, STOP, jnp.int8))
    ids_B = zeros_B.astype(jnp.uint32)
    return Slots(Rows(zeros_B, zeros_B, zeros_B, zeros_B, free_B), ids_B, ids_B, caches.empty(prompts, rows, width))


@functools.partial(jax.jit, donate_argnums=0)
def _insert(
    slots: Slots, prompts: Cache, column, source_B, fresh_B, token_B, position_B, prompt_id_B, sample_B
) -> Slots:
    """New responses in the rows that are fresh, to prompt source_B of those prefilled."""
    old = (slots.rows, slots.prompt_id_B, slots.sample_B)
    new = (Rows.start(token_B, position_B), prompt_id_B, sample_B)
    chosen = jax.tree.map(lambda x, y: _split(jnp.where(fresh_B, y, x)), old, new)
    rows, prompt_id_B, sample_B = chosen
    return Slots(rows, prompt_id_B, sample_B, caches.insert(slots.cache, prompts, source_B, fresh_B, column))


@functools.partial(jax.jit, static_argnames=("columns", "choice", "dtype", "record"), donate_argnums=1)
def _decode(model, slots: Slots, column, limit, until, rules: Rules, *, columns, choice: Choice, dtype, record):
    """At most `limit` tokens of every row that runs, while more than `until` rows run; the first is written at `column` of the ring.

    Returns the slots, what was drawn (tokens, which rows ran, log-probs; [B, columns]), the finish reasons [B], and the experts of the
    tokens that were fed, [B, columns, L, K] or None.
    """
    head = model.head_matrix()
    width = slots.cache.num_columns
    keys_B = row_keys(rules.seed, rules.step, slots.prompt_id_B, slots.sample_B)

    def one_token(carry):
        i, rows, drawn, cache = carry
        hidden_BD, cache = model.decode_step(
            rows.token_B, rows.position_B, cache, (column + i) % width, dtype=jnp.dtype(dtype)
        )
        rows, new = rows.extend(head_logits(hidden_BD, head), keys_B, rules, choice)
        write = lambda x_BC, x_B: jax.lax.dynamic_update_slice(x_BC, x_B[:, None], (0, i))
        return i + 1, rows, tuple(map(write, drawn, new)), cache

    def goes_on(carry):
        return (carry[0] < limit) & (jnp.sum(carry[1].reason_B == RUNNING) > until)

    with jax.named_scope("decode"):
        B = len(slots.sample_B)
        drawn = tuple(_split(jnp.zeros((B, columns), x)) for x in (jnp.int32, bool, jnp.float32))
        _, rows, drawn, cache = jax.lax.while_loop(goes_on, one_token, (jnp.int32(0), slots.rows, drawn, slots.cache))
    ids = cache.expert_ids_BSLK
    if ids is not None:
        ids = jnp.take(ids, (column + jnp.arange(columns)) % width, axis=1)
    rows, drawn = jax.tree.map(_split, (rows, drawn))
    slots = slots._replace(rows=rows, cache=caches.placed(cache))
    return slots, drawn, rows.reason_B, ids


@jax.jit
def _take(slots: Slots, rows_B: jax.Array) -> Slots:
    """The given rows, on several devices each one's from its own."""
    rows, prompt_id_B, sample_B = jax.tree.map(lambda x: _split(caches.take_local(x, rows_B)), slots[:-1])
    return Slots(rows, prompt_id_B, sample_B, caches.take_rows(slots.cache, rows_B))


@functools.partial(jax.jit, static_argnames="width")
def _widen(slots: Slots, column, *, width: int) -> Slots:
    return slots._replace(cache=caches.widen(slots.cache, column, width))


def _split(x: jax.Array) -> jax.Array:
    return constrain(x, BATCH, *([None] * (x.ndim - 1)))
