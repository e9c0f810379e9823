"""Responses of any length into rows without padding: which row each one goes to, and the arrays of an update.

A row holds whole groups or parts of them: a prompt once, then responses to it (`types.Packed`). The shapes are those of a mini-batch
whose responses are all as long as they may be, so that nothing is ever compiled anew; how many passes hold something is a number that
the compiled step is given. Plain NumPy, the same in every process.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from cispo_jax.types import Batch, Packed

ROW_TOKENS = 512  # several responses share a row up to so many columns: longer ones cost attention
PASS_TOKENS = 8192  # of one device at a time, unless a setting says otherwise
PASSES = 8  # at least so many where a device has so many rows: the last one is half empty on average
NO_EXPERT = -1


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes of a packed mini-batch."""

    passes: int  # M at most
    rows: int  # R of a pass, over all devices
    devices: int  # that split them
    tokens: int  # X
    responses: int  # Y, tokens of responses in a row
    longest: int = 1  # responses of one prompt that always fit a row
    packed: bool = True  # False: one response a row
    shared: bool = True  # False: every response behind a copy of its prompt, in one segment with it

    @staticmethod
    def of(
        *,
        prompts: int,
        group_size: int,
        prompt: int,
        response: int,
        devices: int = 1,
        pass_tokens: int = 0,
        packed: bool = True,
        shared: bool = True,
    ) -> Layout:
        """For `prompts` groups of responses, of at most so many tokens of prompt and of response.

        Args:
          pass_tokens: of one device in one forward and backward pass; at least one row. 0: chosen.
          packed: False for one response a row. shared: False where attention cannot mask prefixes.
        """
        X, Y, share = prompt + response - 1, response, 1
        rows = prompts * group_size
        if packed:
            # Full responses of a group split evenly over as few rows as are short enough and give every device one.
            for of_group in range(1, group_size + 1):
                share = -(-group_size // of_group)
                X = (prompt if shared else share * prompt) + share * (response - 1)
                Y, rows = share * response, prompts * of_group
                if X <= ROW_TOKENS and rows >= devices:
                    break
        of_device = -(-rows // devices)
        chosen = min(-(-of_device // PASSES), PASS_TOKENS // X)
        height = min(max(1, pass_tokens // X if pass_tokens else chosen), of_device)
        return Layout(-(-of_device // height), height * devices, devices, X, Y, share, packed, shared)


OF_TOKENS = ("loss_mask", "coefficients", "rollout_log_probs", "old_log_probs")  # of a `Batch`, copied token by token


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the tokens of each response went; B responses of a mini-batch. One without a trained token went nowhere."""

    row: np.ndarray  # int [B], of the M x R rows; -1: nowhere
    start: np.ndarray  # int [B], the first of its columns in Y
    lengths: np.ndarray  # int [B]

    def unpack(self, packed: np.ndarray, padded: np.ndarray) -> np.ndarray:
        """Values [M, R, Y] by response, [B, T]; `padded` where there are none."""
        flat, result = packed.reshape(-1, packed.shape[-1]), padded.copy()
        for i in np.flatnonzero(self.row >= 0):
            start, n = self.start[i], self.lengths[i]
            result[i, :n] = flat[self.row[i], start : start + n]
        return result


def pack(batch: Batch, layout: Layout) -> tuple[Packed, Places]:
    """The arrays of a mini-batch. A response is kept up to its last trained token: nothing that trains depends on what comes after."""
    T = batch.loss_mask.shape[1]
    S = batch.tokens.shape[1] - T
    lengths = np.where(batch.loss_mask.any(axis=1), T - np.argmax(batch.loss_mask[:, ::-1], axis=1), 0)
    prompts = [np.flatnonzero(mask) for mask in batch.padding_mask[:, :S]]  # their columns
    replayed = () if batch.expert_ids is None else (batch.expert_ids,)  # of two equal prompts they may differ
    keys = [b"".join(x[i, columns].tobytes() for x in (batch.tokens, *replayed)) for i, columns in enumerate(prompts)]
    if not layout.shared:
        keys = [bytes(str(i), "ascii") for i in range(len(keys))]
    rows = assign(keys, np.array([len(columns) for columns in prompts]), lengths, layout)
    passes = max(1, -(-len(rows) // layout.rows))
    experts = () if batch.expert_ids is None else batch.expert_ids.shape[2:]
    packed = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), shapes(layout, experts, batch.ref_log_probs is not None)
    )
    if experts:
        packed.expert_ids.fill(NO_EXPERT)
    places = Places(np.full(len(lengths), -1), np.zeros(len(lengths), int), lengths)
    of_device = layout.rows // layout.devices
    size = lambda row: -sum(int(lengths[responses].sum()) for responses in row)
    for index, row in enumerate(sorted(rows, key=size)):
        # From the longest down, in turn to each pass and in it to each device: all get their share.
        in_pass = index // passes
        at = index % passes * layout.rows + in_pass % layout.devices * of_device + in_pass // layout.devices
        into = jax.tree.map(lambda x, at=at: x[divmod(at, layout.rows)], packed._replace(passes=None))
        _fill(into, at, row, batch, prompts, places, layout.shared)
    return packed._replace(passes=np.int32(passes)), places


def assign(keys: list[bytes], prompt_lengths: np.ndarray, lengths: np.ndarray, layout: Layout) -> list[list[list[int]]]:
    """Which responses share a row, of those with a length: for each row, for each prompt in it, their numbers.

    Best fit, long ones first and the responses to a prompt one after the other; a row that has the prompt already costs less.
    """
    of_prompt: dict[bytes, list[int]] = {}
    for trained in np.flatnonzero(lengths).tolist():
        of_prompt.setdefault(keys[trained], []).append(trained)
    groups = [sorted(group, key=lambda i: -int(lengths[i])) for group in of_prompt.values()]
    groups.sort(key=lambda group: -int(lengths[group].sum()))
    if not layout.packed:
        return [[[i]] for group in groups for i in group]
    rows: list[list[list[int]]] = []
    limit = layout.passes * layout.rows
    room = np.tile([layout.tokens, layout.responses], (limit, 1))  # columns of X and of Y that are free
    for group in groups:
        start = prompt_lengths[group[0]]
        of_group: dict[int, list[int]] = {}  # rows that have this prompt
        for i in group:
            cost = np.full(len(rows), start)
            cost[list(of_group)] = 0
            left = room[: len(rows)] - np.stack([cost + lengths[i] - 1, np.full(len(rows), lengths[i])], axis=1)
            fits = np.flatnonzero((left >= 0).all(axis=1))
            if fits.size:
                row = int(fits[np.lexsort((left[fits].sum(axis=1), cost[fits]))[0]])
            elif len(rows) == limit:
                return _evenly(groups, layout)
            else:
                row = len(rows)
                rows.append([])
            if row not in of_group:
                of_group[row] = []
                rows[row].append(of_group[row])
                room[row, 0] -= start
            of_group[row].append(i)
            room[row] -= (lengths[i] - 1, lengths[i])
    return rows


def _evenly(groups: list[list[int]], layout: Layout) -> list[list[list[int]]]:
    """Rows as the layout was made for, where responses share a prompt of one prompt each: they always suffice."""
    longest = layout.longest
    if not layout.shared:
        single = [group for group in groups for _ in group]
        return [single[i : i + longest] for i in range(0, len(single), longest)]
    return [[group[i : i + longest]] for group in groups for i in range(0, len(group), longest)]


def shapes(layout: Layout, experts: tuple[int, ...] = (), reference: bool = False) -> Packed:
    """Shapes and types of a packed mini-batch; `experts`: (L, K) of the selections to replay; `reference`: with its log-probs."""
    X, Y = ((layout.passes, layout.rows, width) for width in (layout.tokens, layout.responses))
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    types: dict[str, Any] = dict.fromkeys(Packed._fields, np.float32)
    types |= dict.fromkeys(("source", "targets", "response_ids"), np.int32) | {"loss_mask": np.bool_}
    of_tokens = ("tokens", "segment_ids", "prefix_ids", "positions", "weights")
    arrays: dict[str, Any] = {name: of(Y, dtype) for name, dtype in types.items()} | {
        name: of(X, np.int32) for name in of_tokens
    }
    some = {"expert_ids": of((*X, *experts), np.int16) if experts else None}
    some |= {} if reference else {"ref_log_probs": None}
    return Packed(**arrays | {"passes": of((), np.int32)} | some)


def _fill(
    into: Packed, at: int, row: list[list[int]], batch: Batch, prompts: list[np.ndarray], places: Places, shared: bool
) -> None:
    """Writes one row: prompt, responses, prompt, responses, ..."""
    S = batch.tokens.shape[1] - batch.loss_mask.shape[1]
    x = y = 0  # the next column of tokens and of predicted tokens
    segment = response = 0

    def tokens(i: int, columns: np.ndarray, *, position: int, prefix: int, weight: int) -> None:
        nonlocal x, segment
        segment += shared or not prefix
        new = slice(x, x + len(columns))
        into.tokens[new] = batch.tokens[i, columns]
        into.segment_ids[new], into.prefix_ids[new], into.weights[new] = segment, prefix or segment, weight
        into.positions[new] = position + np.arange(len(columns))
        if batch.expert_ids is not None and into.expert_ids is not None:
            into.expert_ids[new] = batch.expert_ids[i, columns]
        x += len(columns)

    for group in row:
        columns = prompts[group[0]]
        tokens(group[0], columns, position=0, prefix=0, weight=len(group))
        prompt, end = segment, x - 1
        for i in group:
            n = places.lengths[i]
            new = slice(y, y + n)
            response += 1
            into.source[new] = np.concatenate([[end], x + np.arange(n - 1)])
            into.targets[new] = batch.tokens[i, S : S + n]
            into.response_ids[new] = response
            into.advantages[new] = batch.advantages[i]
            for name in OF_TOKENS if batch.ref_log_probs is None else (*OF_TOKENS, "ref_log_probs"):
                getattr(into, name)[new] = getattr(batch, name)[i, :n]
            tokens(i, S + np.arange(n - 1), position=len(columns), prefix=prompt, weight=1)
            places.row[i], places.start[i] = at, y
            y += n
