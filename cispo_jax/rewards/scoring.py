r"""From the text of a response to an answer, and from an answer to right or wrong.

Where the answer is (the same rule for every task):
  1. inside the last `<answer>...</answer>`;
  2. otherwise after the last `Answer:` (also `answer is:`, `Final answer:`, any case) or `####`: the first line that
     says something, or everything if the reference answer has several lines;
  3. otherwise inside the last `\boxed{...}`, braces balanced;
  4. otherwise the whole response, of which a text answer is the last line (or as many lines as the reference has).
If the reference is a number, the answer is the last number in what the rule found. A `\boxed{}` in 1 or 2 is opened.

How answers compare (`exact_match`; a table, not a mathematical verifier):
  numbers     by exact value: 033 = 33, +7 = 7, 29.00 = 29, `29.` = 29, 2.9e1 = 29, $29 = 29, 28% = 28, 115,000 = 115000
  a comma     is a thousands mark only in digit groups d{1,3}(,ddd)+: `3,5,7` is three numbers, not 357
  a minus     is a sign if it touches its number and follows no digit, letter or bracket: the number in `12 -5` is 5
  text        case, repeated spaces, a space after a comma, enclosing quotes, * and `, a final full stop are ignored
  not judged  fractions (1/2), units, LaTeX: compared as text
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import ModuleType
from typing import Any

from cispo_jax.config import ConfigError

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_EXPONENT = r"(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?"
_NUMBER = re.compile(rf"(?P<sign>[-+\u2212]?)(?:\\?\$)?(?P<digits>(?:{_DIGITS}){_EXPONENT})")
_MARKER = re.compile(r"\banswer(?:\s+is)?[\s*]*:|####", re.IGNORECASE)
_BOXED = "\\boxed{"


def exact_match(responses: list[str], *, examples: list[dict[str, Any]], **_: Any) -> list[float | None]:
    """1.0 where the answer equals `example["answer"]` by the table above, 0.0 elsewhere, None if there is no answer."""
    return [
        float(verdict(response, example) == "right") if str(example.get("answer", "")).strip() else None
        for response, example in zip(responses, examples, strict=True)
    ]


def verdict(response: str, example: Mapping[str, Any]) -> str:
    """`right`; or, for a number, `wrong number` | `no number`; for a text, `wrong answer` | `no answer`."""
    gold = str(example["answer"])
    answer = extract_answer(response, gold)
    value = number_value(gold)
    is_same = _plain(answer) == _plain(gold) if value is None else number_value(answer) == value
    return "right" if answer and is_same else _wrong(answer, gold)


def extract_answer(response: str, gold: str) -> str:
    """The answer in a response (rule above), "" if there is none; a number without its commas and currency."""
    gold = gold.strip()
    lines = gold.count("\n") + 1
    found, is_whole = _find(response, lines)
    if number_value(gold) is not None:
        numbers = _numbers(found)
        return numbers[-1] if numbers else ""
    if is_whole:
        found = "\n".join(found.strip().split("\n")[-lines:])
    return _clean(found, gold)


def number_value(text: str) -> Decimal | None:
    """The exact value of a text that is one number and nothing else (see the table), otherwise None."""
    match = _NUMBER.fullmatch(text.strip().removesuffix(".").removesuffix("%").removesuffix("\\"))
    if match is None:
        return None
    value = Decimal(match["digits"].replace(",", ""))
    return value.copy_negate() if match["sign"] in ("-", "\u2212") else value


def _wrong(answer: str, gold: str) -> str:
    kind = "answer" if number_value(gold) is None else "number"
    return f"wrong {kind}" if answer else f"no {kind}"


def _find(response: str, lines: int) -> tuple[str, bool]:
    """The part of a response that holds the answer, and whether that is all of it for lack of a mark."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        return _open_box(response[start + len("<answer>") : end]), False
    markers = list(_MARKER.finditer(response))
    if markers:
        rest = response[markers[-1].end() :].strip(" \t\r\n*:")
        return _open_box(rest if lines > 1 else rest.split("\n")[0]), False
    boxed = _last_box(response)
    return (response, True) if boxed is None else (boxed, False)


def _open_box(text: str) -> str:
    boxed = _last_box(text)
    return text if boxed is None else boxed


def _last_box(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None  # never closed


def _numbers(text: str) -> list[str]:
    found = []
    for match in _NUMBER.finditer(text):
        before = text[max(0, match.start() - 16) : match.start()]
        # "x-5", "12-5", "12 -5" and ") -5" are differences; "is -5" is a negative number.
        is_operator = before[-1:].isalnum() or before.rstrip(" \t")[-1:] in tuple("0123456789)]")
        sign = "-" if match["sign"] in ("-", "\u2212") and not is_operator else ""
        found.append(sign + match["digits"].replace(",", ""))
    return found


def _clean(text: str, gold: str) -> str:
    text = text.strip().strip("*`").strip()
    if text.endswith(".") and not gold.endswith("."):
        text = text[:-1].rstrip().rstrip("*`")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and not gold.startswith(text[0]):
        text = text[1:-1].strip()
    return text


def _plain(text: str) -> str:
    text = _clean(text, gold="")
    return re.sub(r",\s+", ",", " ".join(text.split())).casefold()


@dataclass(frozen=True)
class ReasoningGymScorer:
    """The scorer of a reasoning-gym task as a reward: 1.0 for a full score, 0.0 for anything less.

    reasoning-gym gives partial credit for near misses and for answers wrapped in other text. Here only what the
    extraction rule above finds is scored, and only a full score counts, so that the reward is the accuracy that is
    evaluated. A scorer that raises on an answer gives None (unscored), which is logged once a task.

    Attributes:
      task: name in reasoning-gym, such as `chain_sum`.
      options: fields of the task's config; some scorers read them.
    """

    task: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, responses: list[str], *, examples: list[dict[str, Any]], **_: Any) -> list[float | None]:
        return [self._score(response, example) for response, example in zip(responses, examples, strict=True)]

    def verdict(self, response: str, example: Mapping[str, Any]) -> str:
        """As `cispo_jax.rewards.verdict`, with the task's scorer as the judge of right."""
        if self._score(response, example) == 1.0:
            return "right"
        return _wrong(extract_answer(response, example["answer"]), example["answer"])

    def _score(self, response: str, example: Mapping[str, Any]) -> float | None:
        answer = extract_answer(response, example["answer"])
        if not answer:
            return 0.0
        metadata = json.loads(example["metadata"])
        entry = {"question": example["prompt"], "answer": example["answer"], "metadata": metadata}
        try:
            score = _dataset(self.task, json.dumps(dict(self.options), sort_keys=True)).score_answer(answer, entry)
        except Exception as error:
            _warn_once(self.task, type(error).__name__)
            return None
        return float(score >= 1.0)


@functools.lru_cache(maxsize=32)
def _dataset(task: str, options: str) -> Any:
    return import_reasoning_gym().create_dataset(task, seed=0, size=1, **json.loads(options))


@functools.cache
def _warn_once(task: str, error: str) -> None:
    logging.getLogger(__name__).warning("The scorer of reasoning_gym:%s raised %s: answer left unscored.", task, error)


def import_reasoning_gym() -> ModuleType:
    """The package, or how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a dependency leaves a file open while it is imported
            import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"config.data.source=reasoning_gym:TASK needs reasoning-gym ({error}): pip install 'cispo-jax[rewards]'."
        ) from error
    return reasoning_gym


def reasoning_gym_version() -> str:
    """Version of the installed package (its own `__version__` lags behind)."""
    return importlib.metadata.version("reasoning-gym")
