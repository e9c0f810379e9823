"""The order of the prompts: a pure function of (seed, position) and of what the run has seen, all of it in one small table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cispo_jax.config import ConfigError

State = dict[
    str, Any
]  # what a checkpoint holds of the order, as JSON: "position" and, where they are used, the fields below


@dataclass(frozen=True)
class Schedule:
    """How often a task comes, and when it gets harder.

    Attributes:
      weight: its share of the prompts, relative to the others'.
      levels: of difficulty; examples carry theirs as `level`, from 0.
      advance_at: share of passed responses at which the next level begins ...
      window: ... over at least so many prompts of the level before.
    """

    weight: float = 1.0
    levels: int = 1
    advance_at: float = 1.0
    window: int = 64


class PromptStream:
    """Endless examples, reshuffled every epoch.

    Without a curriculum and retirement, `stream[position]` is all there is: a pure function of (seed, position), so that a checkpoint
    holds one number and any number of processes can take any part of the order. Every epoch of a task holds each of its examples once;
    prompts of one step may straddle two epochs and nothing is dropped. Tasks are mixed in proportion to their weights at every point of
    the order, not at random.

    Args:
      examples: all of them; those of a mixture carry `task` and `level`.
      schedules: by task; empty without a mixture.
      retire_at: a prompt whose responses have passed in this share, over all times it came, does not come again (ScaleRL's "no positive
        resampling", arXiv 2510.13786); 0 = off.
    """

    def __init__(
        self,
        examples: Sequence[dict[str, Any]],
        seed: int,
        schedules: Mapping[str, Schedule] | None = None,
        retire_at: float = 0.0,
    ):
        if not len(examples):
            raise ConfigError("The training set is empty: there is no prompt to sample from.")
        import grain  # here, not above: it loads jax, which `cispo_jax.data` and reward workers do without

        self._examples, self._schedules, self._retire_at = examples, dict(schedules or {}), retire_at
        self._groups: dict[tuple[str, int], Sequence[int]] = {("", 0): range(len(examples))}
        if schedules:
            members: dict[tuple[str, int], list[int]] = {}
            for index in range(len(examples)):
                example = examples[index]
                members.setdefault((example["task"], example["level"]), []).append(index)
            self._groups = dict(members)
        # grain takes seeds below 2**32.
        self._orders = {
            group: grain.MapDataset.range(len(indices)).seed(seed % 2**32).shuffle().repeat()
            for group, indices in self._groups.items()
        }
        tasks = list(self._schedules) or [""]
        shares = [self._schedules[task].weight if task else 1.0 for task in tasks]
        turns = [grain.MapDataset.range(2**40).map(lambda turn, task=task: (task, turn)) for task in tasks]
        self._turns = (
            grain.MapDataset.mix(turns, [share / sum(shares) for share in shares]) if len(tasks) > 1 else turns[0]
        )

    def __getitem__(self, position: int) -> dict[str, Any]:
        """The example at a position, every task at its first level."""
        return self._at(position, {})

    def take(self, state: State, count: int) -> tuple[list[dict[str, Any]], list[int]]:
        """The next examples and their positions; moves `state`.

        Raises:
          ConfigError: all prompts are retired.
        """
        examples: list[dict[str, Any]] = []
        positions: list[int] = []
        retired = set(state.get("retired", ()))
        passed_over = 0
        while len(examples) < count:
            position = state["position"]
            state["position"] += 1
            example = self._at(position, state.get("levels", {}))
            if example.get("id") in retired:
                passed_over += 1
                if passed_over > 4 * len(self._examples) + 1000:
                    raise ConfigError(
                        f"config.data.retire_at={self._retire_at}: {len(retired):,} of {len(self._examples):,} prompts are retired and no "
                        "other comes; the data holds nothing more to learn."
                    )
                continue
            examples.append(example)
            positions.append(position)
        return examples, positions

    def observe(self, state: State, examples: Sequence[dict[str, Any]], pass_rates: Sequence[float | None]) -> None:
        """Notes how many responses to each example passed (None: not known); retires prompts and raises levels."""
        known = [(example, rate) for example, rate in zip(examples, pass_rates, strict=True) if rate is not None]
        for example, rate in known if self._retire_at else ():
            passed = state.setdefault("passed", {}).setdefault(example["id"], [0.0, 0])
            passed[0], passed[1] = passed[0] + rate, passed[1] + 1
            if passed[0] >= self._retire_at * passed[1] and example["id"] not in state.setdefault("retired", []):
                state["retired"].append(example["id"])
        for task, schedule in self._schedules.items():
            level = state.get("levels", {}).get(task, 0)
            if level + 1 >= schedule.levels:
                continue
            rates = [rate for example, rate in known if (example["task"], example["level"]) == (task, level)]
            recent = state.setdefault("recent", {}).setdefault(task, [0.0, 0])
            recent[0], recent[1] = recent[0] + sum(rates), recent[1] + len(rates)
            if recent[1] >= schedule.window:
                if recent[0] >= schedule.advance_at * recent[1]:
                    state.setdefault("levels", {})[task] = level + 1
                state["recent"][task] = [0.0, 0]

    def metrics(self, state: State) -> dict[str, float]:
        levels = {
            f"data/level/{t}": state.get("levels", {}).get(t, 0) for t, s in self._schedules.items() if s.levels > 1
        }
        return levels | ({"data/retired": len(state.get("retired", ()))} if self._retire_at else {})

    def _at(self, position: int, levels: Mapping[str, int]) -> dict[str, Any]:
        if position < 0:
            raise IndexError(f"position {position} is before the start of the stream")
        task, turn = self._turns[position]
        group = task, levels.get(task, 0)
        return self._examples[self._groups[group][self._orders[group][turn]]]
