"""The values that travel between the layers: a rollout (host), a batch of it (device), the state of training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np

FINISH_REASONS = ("stop", "length", "repetition")  # names of Rollout.finish_reason's codes


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

    def take(self, rows: np.ndarray) -> Rollout:
        """The given rows, in that order."""
        return Rollout(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @staticmethod
    def concatenate(rollouts: list[Rollout]) -> Rollout:
        """Rows of several rollouts of equal prompt and response width."""
        names = [field.name for field in fields(Rollout)]
        return Rollout(**{name: np.concatenate([getattr(rollout, name) for rollout in rollouts]) for name in names})


Array = jax.Array | np.ndarray


class Batch(NamedTuple):
    """Rows of a rollout with everything an update needs; leading axis rows, so that slices are mini-batches."""

    tokens: Array  # int32 [B, S+T], prompt and response
    padding_mask: Array  # bool [B, S+T]
    loss_mask: Array  # bool [B, T]
    advantages: Array  # float32 [B]
    rollout_log_probs: Array  # float32 [B, T]
    old_log_probs: Array  # float32 [B, T], frozen for all updates of the batch
    group_ids: Array  # int32 [B], which prompt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What the optimizer moves: float32 master weights and its moments."""

    updates: jax.Array  # int32 scalar, optimizer steps taken
    model: Any
    optimizer: Any
