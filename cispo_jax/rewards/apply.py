"""Calling one reward function on a batch and making sense of what it does, inline or inside a worker."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cispo_jax.config import ConfigError, suggest
from cispo_jax.rewards.functions import describe_error


class RewardError(ConfigError):
    """A reward function is broken: it returns something else than one number a response, or fails on everything."""


@dataclass(frozen=True)
class Rows:
    """What reward functions are told, one entry a response; responses of one prompt lie next to each other."""

    responses: list[str]
    examples: list[dict[str, Any]]
    finish_reasons: list[str]  # stop | length
    response_tokens: list[int]  # lengths, the EOS included

    def __len__(self) -> int:
        return len(self.responses)

    def slice(self, start: int, stop: int) -> Rows:
        return Rows(*(getattr(self, name)[start:stop] for name in self.__dataclass_fields__))

    def groups(self) -> list[Rows]:
        """One `Rows` for each run of responses to the same example."""
        inner = [i for i in range(1, len(self)) if not same_example(self.examples[i - 1], self.examples[i])]
        return [self.slice(start, stop) for start, stop in itertools.pairwise([0, *inner, len(self)]) if stop > start]


class Outcome(NamedTuple):
    """Values in the order of the rows (None = unscored), how many rows an exception left unscored, what was raised."""

    values: list[float | None]
    failed: int
    errors: list[str]


def same_example(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a is b or ("id" in a and a["id"] == b.get("id"))


def apply(function: Callable[..., Any], label: str, rows: Rows) -> Outcome:
    """Calls a reward function on all rows; if it raises, again on each group, so that one bad example costs one group.

    Raises:
      RewardError: what it returns is not one number (or None) for each response.
    """
    try:
        return Outcome(_checked(_call(function, rows), label, rows), 0, [])
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in a reward must not end the run as if it were done
        groups = rows.groups()
        if len(groups) == 1:
            return Outcome([None] * len(rows), len(rows), [_describe(error, label, rows.examples[0])])
    outcomes = [apply(function, label, group) for group in groups]
    return Outcome(
        [value for outcome in outcomes for value in outcome.values],
        sum(outcome.failed for outcome in outcomes),
        [error for outcome in outcomes for error in outcome.errors],
    )


def _call(function: Callable[..., Any], rows: Rows) -> Any:
    return function(
        rows.responses, examples=rows.examples, finish_reasons=rows.finish_reasons, response_tokens=rows.response_tokens
    )


def _checked(values: Any, label: str, rows: Rows) -> list[float | None]:
    if hasattr(values, "tolist"):  # NumPy arrays are welcome
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"{label} returned {_short(values)}; a reward returns a list with one number (or None) for each response."
        )
    if len(values) != len(rows):
        raise RewardError(
            f"{label} returned {len(values)} values for {len(rows)} responses; it must return one for each."
        )
    return [_number(value, label, example) for value, example in zip(values, rows.examples, strict=True)]


def _number(value: Any, label: str, example: dict[str, Any]) -> float | None:
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value  # a NumPy or jax scalar
    if not isinstance(value, numbers.Real) or math.isinf(value):
        raise RewardError(
            f"{label} returned {_short(value)} for a response to example {example.get('id')!r}; a reward is a finite "
            "number, or None where it cannot tell."
        )
    return None if math.isnan(value) else float(value)


def _describe(error: BaseException, label: str, example: dict[str, Any]) -> str:
    text = f"{label} raised {describe_error(error)} on example {example.get('id')!r}"
    if isinstance(error, KeyError) and error.args and error.args[0] not in example:
        field, names = error.args[0], [str(name) for name in example]
        text += f"; the example has no field {field!r}.{suggest(str(field), names)} It has: {', '.join(names)}"
    return text + "."


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}... ({type(value).__name__})" if len(text) > 60 else f"{text} ({type(value).__name__})"
