"""The reward that a rehearsal adds to those of the config."""

from __future__ import annotations

import itertools
import zlib
from typing import Any


def varied(responses: list[str], *, examples: list[dict[str, Any]], **_: Any) -> list[float]:
    """0 and 1 in turn within a group; 0 throughout for a quarter of the prompts.

    Random weights earn nothing: without it no group would have a signal, and no update would ever be rehearsed. The silent quarter is
    what dynamic sampling drops and refills.
    """
    scores: list[float] = []
    for prompt, group in itertools.groupby(example["prompt"] for example in examples):
        silent = zlib.crc32(prompt.encode()) % 4 == 0
        scores += [0.0 if silent else float(row % 2) for row, _ in enumerate(group)]
    return scores
