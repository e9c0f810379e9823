r"""Rewards that need no reference answer: the form of a response, and how much it repeats itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cispo_jax.rewards.math import extract

_TAG = re.compile(r"<answer>(?:(?!</?answer>).)+</answer>\s*\Z", re.DOTALL)


def _is_boxed(text: str) -> bool:
    rest = extract.after_reasoning(text)
    return rest is not None and r"\boxed{" in rest and bool(extract.final_answer(rest[rest.rindex(r"\boxed{") :]))


def _is_thought(text: str) -> bool:
    thought, end, rest = text.partition("</think>")
    return (
        bool(end and thought.removeprefix("<think>").strip() and rest.strip()) and "<think>" not in rest + thought[7:]
    )


FORMATS = {
    "boxed": _is_boxed,  # the last box is closed and holds something
    "answer_line": lambda text: extract.answer_line(text) is not None,  # a line `Answer: ...`
    "answer_tag": lambda text: (
        text.count("<answer>") == 1 and _TAG.search(text) is not None
    ),  # ends in <answer>...</answer>
    "think": _is_thought,  # reasoning, one </think>, and something after it; the prompt may have opened <think>
}


@dataclass(frozen=True)
class FormatReward:
    """1.0 for a response of the form `kind` (`FORMATS`), 0.0 otherwise."""

    kind: str

    def __call__(self, responses: list[str], **_: Any) -> list[float]:
        return [float(FORMATS[self.kind](text)) for text in responses]


@dataclass(frozen=True)
class RepetitionPenalty:
    """Minus the share of a response's n-grams of words that it has said before: 0 without a repetition, towards -1 in a loop."""

    size: int

    def __call__(self, responses: list[str], **_: Any) -> list[float]:
        return [self._of(text.split()) for text in responses]

    def _of(self, words: list[str]) -> float:
        grams = [tuple(words[i : i + self.size]) for i in range(len(words) - self.size + 1)]
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0
