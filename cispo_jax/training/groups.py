"""From sampled and scored groups to the arrays an update trains on: which groups, which tokens, which advantages, in what order.

Plain NumPy on whole groups; P prompts with G responses each, rows prompt-major.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from cispo_jax.advantages import group_relative_advantages, rloo_advantages
from cispo_jax.config import Config
from cispo_jax.types import Rollout


@dataclasses.dataclass(frozen=True)
class Scored:
    """A rollout with what came of it; P groups of G rows."""

    rollout: Rollout
    examples: list[dict[str, Any]]  # [P]
    texts: list[str]  # [P*G]
    rewards: np.ndarray  # float64 [P, G], NaN where unscored
    parts: dict[str, list[float | None]]  # by reward function, [P*G]

    def pass_rates(self) -> list[float | None]:
        """Of each prompt, the share of responses that are right: full marks of the data set's scorer, or a total of 1 without it."""
        P, G = self.rewards.shape
        task = self.parts.get("task")
        scores = self.rewards if task is None else np.array([np.nan if x is None else x for x in task]).reshape(P, G)
        known = ~np.isnan(scores)
        return [float(np.mean(row[k] >= 1)) if k.any() else None for row, k in zip(scores, known, strict=True)]


def admit(scored: Scored, *, dynamic: bool) -> np.ndarray:
    """Which groups train, bool [P]: those with two rewards to compare and, under dynamic sampling, two different ones."""
    valid = ~np.isnan(scored.rewards)
    low = np.min(np.where(valid, scored.rewards, np.inf), axis=1)
    high = np.max(np.where(valid, scored.rewards, -np.inf), axis=1)
    return (valid.sum(axis=1) >= 2) & ((high > low) | (not dynamic))


def assemble(
    batches: list[Scored], admitted: list[np.ndarray], config: Config
) -> tuple[Rollout, np.ndarray, np.ndarray]:
    """Exactly P groups in a fixed shape: the admitted ones first come, the rest filled with masked ones, spread over mini-batches.

    Returns rollout, rewards [P, G] and which groups are live, bool [P], in training order.
    """
    P, G, N = config.sampling.prompts_per_step, config.sampling.group_size, config.objective.num_minibatches
    live = np.concatenate(admitted)
    order = np.argsort(~live, kind="stable")[:P]
    order = order.reshape(P // N, N).T.reshape(-1)  # group i of the order goes to mini-batch i % N
    rows = (order[:, None] * G + np.arange(G)).reshape(-1)
    rollout = Rollout.concatenate([batch.rollout for batch in batches]).take(rows)
    return rollout, np.concatenate([batch.rewards for batch in batches])[order], live[order]


def trained_tokens(config: Config, rollout: Rollout, rewards_PG: np.ndarray, live_P: np.ndarray) -> np.ndarray:
    """Which tokens train, bool [P*G, T]: those of live groups and scored rows, and of truncated responses if the settings say so."""
    mask = rollout.loss_mask & np.repeat(live_P, config.sampling.group_size)[:, None]
    mask &= ~np.isnan(rewards_PG).reshape(-1, 1)
    if not config.objective.train_truncated:
        mask &= (np.array(rollout.finish_reasons) != "length")[:, None]
    return mask


def compute_advantages(config: Config, rewards_PG: np.ndarray, live_P: np.ndarray) -> np.ndarray:
    """Advantages float32 [P, G] over complete groups; rows without a reward and groups that do not train get 0."""
    valid_PG = ~np.isnan(rewards_PG) & live_P[:, None]
    rewards_PG = np.nan_to_num(rewards_PG).astype(np.float32)
    if config.objective.advantage == "rloo":
        return np.asarray(rloo_advantages(rewards_PG, valid_PG=valid_PG))
    scale = None if config.objective.advantage_scale == "none" else config.objective.advantage_scale
    return np.asarray(group_relative_advantages(rewards_PG, scale=scale, valid_PG=valid_PG))


def minibatches(config: Config, step: int, *, num_epochs: int) -> Iterator[slice]:
    """Rows of each update: whole groups, every one once an epoch; later epochs go through the mini-batches in another order."""
    N = config.objective.num_minibatches
    rows = config.sampling.prompts_per_step // N * config.sampling.group_size
    for epoch in range(num_epochs):
        order = np.random.default_rng((config.seed, step, epoch)).permutation(N) if epoch else range(N)
        yield from (slice(i * rows, (i + 1) * rows) for i in order)
