"""The order of the prompts: a pure function of (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cispo_jax.config import ConfigError


class PromptStream:
    """Endless examples, reshuffled every epoch; `stream[position]` is a pure function of (seed, position).

    The position is one integer that only grows, so that a checkpoint holds one number and any number of processes can
    take any part of the order. Every epoch holds each example once: positions k * len(examples) up to (k + 1) *
    len(examples). Prompts of one step may straddle two epochs; nothing is dropped.
    """

    def __init__(self, examples: Sequence[dict[str, Any]], seed: int):
        if not len(examples):
            raise ConfigError("The training set is empty: there is no prompt to sample from.")
        import grain  # here, not above: it loads jax, which `cispo_jax.data` and reward workers do without

        # grain takes seeds below 2**32.
        self._order = grain.MapDataset.range(len(examples)).seed(seed % 2**32).shuffle().repeat()
        self._examples = examples

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position < 0:
            raise IndexError(f"position {position} is before the start of the stream")
        return self._examples[self._order[position]]
