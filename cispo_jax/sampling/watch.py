"""What the host does while responses are sampled: it hands complete groups on and says how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cispo_jax.types import FINISH_REASONS, Progress

EVERY = 60.0  # seconds between two lines


class Watch:
    """The `on_sync` of a rollout.

    Args:
      examples: one for each of the P prompts.
      group_size: G.
      mine: the prompts whose groups this process scores.
      decode: ids to text.
      begin: starts to score a group: (texts, examples, finish reasons, lengths), one for each response (`Scorer.begin`).
      say: prints a line.
    """

    def __init__(
        self,
        examples: Sequence[dict[str, Any]],
        group_size: int,
        *,
        mine: slice,
        decode: Callable[[list[int]], str],
        begin: Callable[..., None],
        say: Callable[[str], None],
    ):
        self.examples, self.G, self.mine = examples, group_size, mine
        self.decode, self.begin, self.say = decode, begin, say
        self.running = np.full(len(examples), group_size)  # responses of each group
        self.start = self.last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        groups = progress.ended // self.G
        np.subtract.at(self.running, groups, 1)
        for group in np.unique(groups[self.running[groups] == 0]).tolist():
            if group in range(len(self.examples))[self.mine]:
                rows = range(group * self.G, (group + 1) * self.G)
                tokens = [progress.response_tokens[i, : progress.lengths[i]].tolist() for i in rows]
                reasons = [FINISH_REASONS[progress.finish_reason[i]] for i in rows]
                texts = list(map(self.decode, tokens))
                self.begin(texts, [self.examples[group]] * self.G, reasons, list(map(len, tokens)))
        now = time.monotonic()
        if now - self.last >= EVERY and self.running.any():
            self.last, sampled = now, int(progress.lengths.sum())
            total = len(self.examples) * self.G
            self.say(
                f"  sampling: {total - self.running.sum():,} of {total:,} responses, {sampled:,} tokens, "
                f"{sampled / (now - self.start):,.0f} a second"
            )
