"""The values that travel between the layers: a rollout (host), a batch of it (device), the state of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np

FINISH_REASONS = ("stop", "length", "repetition")  # names of Rollout.finish_reason's codes


class Progress(NamedTuple):
    """A rollout that goes on, in host memory; rows as in `Rollout`. The arrays are the sampler's own, to be read at once."""

    ended: np.ndarray  # int [n], the rows that have ended since the last look
    lengths: np.ndarray  # int [P*G], tokens sampled
    response_tokens: np.ndarray  # int32 [P*G, T]
    finish_reason: np.ndarray  # int8 [P*G], of rows that have ended an index into FINISH_REASONS


@dataclass(frozen=True)
class Rollout:
    """Sampled groups in host memory. Rows are prompt-major: row p x G + g is sample g of prompt p."""

    prompt_tokens: np.ndarray  # int32 [P*G, S], left-padded
    prompt_mask: np.ndarray  # bool [P*G, S], true on real tokens
    response_tokens: np.ndarray  # int32 [P*G, T], right-padded, the EOS included
    response_mask: np.ndarray  # bool [P*G, T], true on sampled tokens
    loss_mask: np.ndarray  # bool [P*G, T], true on tokens that train; equals response_mask until rows are left out
    log_probs: np.ndarray  # float32 [P*G, T], of the sampled token at the sampling temperature, 0 on pads
    finish_reason: np.ndarray  # int8 [P*G], index into FINISH_REASONS
    # int16 [P*G, S+T, L, K] where it was recorded: the experts that each token took; -1 for pads, for layers without experts and for the
    # last token, which was sampled and never fed
    expert_ids: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Sampled tokens of each response, int [P*G]; counts what was generated, whatever trains."""
        return self.response_mask.sum(axis=1)

    @property
    def finish_reasons(self) -> list[str]:
        return [FINISH_REASONS[code] for code in self.finish_reason]

    def responses(self) -> list[list[int]]:
        """The sampled ids of each row without padding."""
        return [row[mask].tolist() for row, mask in zip(self.response_tokens, self.response_mask, strict=True)]

    def take(self, rows: np.ndarray | slice) -> Rollout:
        """The given rows, in that order."""
        return self._map(lambda x: x[rows])

    @staticmethod
    def concatenate(rollouts: list[Rollout]) -> Rollout:
        """Rows of several rollouts of equal prompt and response width."""
        return rollouts[0]._map(lambda *parts: np.concatenate(parts), *rollouts[1:])

    def _map(self, function: Callable[..., np.ndarray], *others: Rollout) -> Rollout:
        columns = {field.name: [getattr(x, field.name) for x in (self, *others)] for field in fields(self)}
        mapped: dict[str, Any] = {n: None if parts[0] is None else function(*parts) for n, parts in columns.items()}
        return Rollout(**mapped)


Leaf = Any  # an array on the host or on devices, or its shape


class Batch(NamedTuple):
    """Rows of a rollout with everything an update needs, on the host; leading axis rows, so that slices are mini-batches."""

    tokens: np.ndarray  # int32 [B, S+T], prompt (left-padded) and response (right-padded)
    padding_mask: np.ndarray  # bool [B, S+T]
    loss_mask: np.ndarray  # bool [B, T]
    coefficients: np.ndarray  # float32 [B, T], of each token in the loss of its mini-batch
    advantages: np.ndarray  # float32 [B]
    rollout_log_probs: np.ndarray  # float32 [B, T]
    old_log_probs: np.ndarray  # float32 [B, T], frozen for all updates of the batch
    expert_ids: np.ndarray | None = None  # int16 [B, S+T, L, K], a selection to replay
    ref_log_probs: np.ndarray | None = None  # float32 [B, T], of the reference policy, where there is one


class Packed(NamedTuple):
    """A mini-batch without its padding, as an update takes it: M passes of R rows, of which the first `passes` hold something.

    A row has X columns of tokens, where a prompt is followed by responses to it, less the last token of each, which nothing is predicted
    from; and Y columns of predicted tokens, with all that the loss asks about them.
    """

    passes: Leaf  # int32 scalar
    tokens: Leaf  # int32 [M, R, X]
    segment_ids: Leaf  # int32 [M, R, X], 1, 2, ... along a row for each prompt and each response, 0 = pad
    prefix_ids: Leaf  # int32 [M, R, X], the segment of the prompt; of a prompt its own, and where each response has a copy of it
    positions: Leaf  # int32 [M, R, X], 0 at the first token of a prompt
    weights: Leaf  # int32 [M, R, X], how many responses of the row a token belongs to
    source: Leaf  # int32 [M, R, Y], the column that the token is predicted from
    targets: Leaf  # int32 [M, R, Y], the token
    response_ids: Leaf  # int32 [M, R, Y], 1, 2, ... along a row, 0 = pad
    loss_mask: Leaf  # bool [M, R, Y]
    coefficients: Leaf  # this and the following float32 [M, R, Y]; see `Batch`
    advantages: Leaf
    rollout_log_probs: Leaf
    old_log_probs: Leaf
    expert_ids: Leaf | None = None  # int16 [M, R, X, L, K]
    ref_log_probs: Leaf | None = None  # as `old_log_probs`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What the optimizer moves: float32 master weights and its moments."""

    updates: jax.Array  # int32 scalar, optimizer steps taken
    model: Any
    optimizer: Any
