"""One scorer for a mixture of tasks: each example goes to the scorer of its own task."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cispo_jax.rewards import math, scoring


@dataclass(frozen=True)
class MixedScorer:
    """Scores each response by the scorer of its example's task.

    Attributes:
      scorers: by `scorer` of an example: `module:name` of a function, or of a dataclass, and the fields of the latter. Not the objects
        themselves, so that a worker can make them.
    """

    scorers: Mapping[str, Sequence[Any]]

    def __call__(self, responses: list[str], *, examples: list[dict[str, Any]], **others: Any) -> list[float | None]:
        scores: list[float | None] = [None] * len(responses)
        for name in self.scorers:
            rows = [row for row, example in enumerate(examples) if example["scorer"] == name]
            if rows:
                mine = {key: [values[row] for row in rows] for key, values in others.items()}
                found = self._scorer(name)([responses[r] for r in rows], examples=[examples[r] for r in rows], **mine)
                for row, score in zip(rows, found, strict=True):
                    scores[row] = score
        return scores

    def verdict(self, response: str, example: Mapping[str, Any]) -> str:
        """As `cispo_jax.rewards.verdict`, by the example's own scorer."""
        return verdict_of(self._scorer(example["scorer"]))(response, example)

    def answer(self, response: str, example: Mapping[str, Any]) -> str:
        return answer_of(self._scorer(example["scorer"]))(response, example)

    def _scorer(self, name: str) -> Any:
        return _make(*(json.dumps(part, sort_keys=True) for part in self.scorers[name]))


@functools.cache
def _make(name: str, arguments: str) -> Any:
    module, _, attribute = json.loads(name).partition(":")
    found = getattr(importlib.import_module(module), attribute)
    fields = json.loads(arguments)
    return found if fields is None else found(**fields)


def verdict_of(scorer: Any) -> Callable[[str, Mapping[str, Any]], str]:
    """`verdict(response, example)` that goes with a scorer: `right`, `wrong number`, `no answer`, ..."""
    if hasattr(scorer, "verdict"):
        return scorer.verdict
    return math.verdicts(scorer) if scorer in (math.math_reward, math.answer_line_reward) else scoring.verdict


def answer_of(scorer: Any) -> Callable[[str, Mapping[str, Any]], str]:
    """`answer(response, example)` that goes with a scorer: the answer as it votes in maj@k, "" where there is none."""
    if hasattr(scorer, "answer"):
        return scorer.answer
    if scorer in (math.math_reward, math.answer_line_reward):
        return math.answers(scorer)
    return lambda response, example: scoring.extract_answer(response, str(example["answer"]))
