"""All rewards of a run as one object: the data set's scorer, the user's functions and the overlong penalty, summed."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from cispo_jax.config import ConfigError, RewardSettings, suggest
from cispo_jax.rewards.apply import Outcome, RewardError, Rows, apply
from cispo_jax.rewards.functions import resolve
from cispo_jax.rewards.parts import FORMATS, FormatReward, RepetitionPenalty
from cispo_jax.rewards.workers import Workers, name_of

TASK, OVERLONG, FORMAT, REPETITION = BUILT_IN = ("task", "overlong", "format", "repetition")
Reward = Callable[..., Any]
Divide = Callable[[Callable[[slice], list], int], list]
logger = logging.getLogger(__name__)


def build(
    settings: RewardSettings, scorer: Reward | None, *, max_new_tokens: int, divide: Divide | None = None
) -> Scorer:
    """The rewards that the settings ask for.

    Args:
      settings: the config's `rewards` section.
      scorer: the data set's own reward (`Problems.scorer`).
      max_new_tokens: limit of a response in tokens, where the overlong penalty is full.
      divide: see `Scorer`.

    Raises:
      ConfigError: a function cannot be found or called, nothing would be scored, or the penalty does not fit the limit.
    """
    if settings.task not in ("auto", "on", "off"):
        raise ConfigError(f"config.rewards.task={settings.task!r} is not one of auto, on, off.")
    functions: dict[str, Reward | str] = {}
    if settings.task == "on" or (settings.task == "auto" and not settings.functions):
        if scorer is None:
            raise ConfigError(
                "The data set has no scorer of its own; name a function: config.rewards.NAME=path/file.py:function."
            )
        functions[TASK] = scorer
    for name, spec in settings.functions.items():
        if name in BUILT_IN:
            raise ConfigError(
                f"config.rewards.{name}={spec}: {', '.join(BUILT_IN)} name built-in parts; choose another."
            )
        functions[name] = spec
    if settings.format:
        if settings.format not in FORMATS:
            raise ConfigError(f"config.rewards.format={settings.format!r} is not one of {', '.join(FORMATS)}.")
        functions[FORMAT] = FormatReward(settings.format)
    if settings.repetition_ngram < 0:
        raise ConfigError(
            f"config.rewards.repetition_ngram={settings.repetition_ngram} must be 0 (off) or a number of words."
        )
    if settings.repetition_ngram:
        functions[REPETITION] = RepetitionPenalty(settings.repetition_ngram)
    if not functions:
        raise ConfigError(
            "config.rewards.task=off and no function named: nothing is scored. Set task=on or config.rewards.NAME."
        )
    if settings.workers < 0:
        raise ConfigError(
            f"config.rewards.workers={settings.workers} must be 0 (score in the trainer) or a number of processes."
        )
    buffer, penalty = settings.overlong_buffer, settings.overlong_penalty
    if not 0 <= buffer <= max_new_tokens:
        raise ConfigError(
            f"config.rewards.overlong_buffer={buffer} (tokens) must lie between 0 (off) and "
            f"config.sampling.max_new_tokens={max_new_tokens}."
        )
    if not 0 <= penalty < float("inf"):
        raise ConfigError(f"config.rewards.overlong_penalty={penalty} must be a finite number >= 0; it is subtracted.")
    if not 0 <= settings.timeout < float("inf") or (settings.timeout and not settings.workers):
        raise ConfigError(
            f"config.rewards.timeout={settings.timeout} must be 0 (no limit) or seconds, and needs config.rewards.workers > 0: only a "
            "process of its own can be stopped."
        )
    overlong = (max_new_tokens, buffer, penalty) if buffer and penalty else None
    parts = [*functions, *([OVERLONG] if overlong else [])]
    for name, weight in settings.weights.items():
        if (
            name not in parts
            or isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not math.isfinite(weight)
        ):
            raise ConfigError(
                f"config.rewards.weights.{name}={weight!r}: a finite number for one of the parts {', '.join(parts)}.{suggest(name, parts)}"
            )
    return Scorer(
        functions,
        workers=settings.workers,
        timeout=settings.timeout,
        overlong=overlong,
        weights=settings.weights,
        divide=divide,
    )


class Scorer:
    """Scores a batch: `total, parts = scorer(responses, examples, finish_reasons, response_tokens)`.

    `total` is the sum over parts, each times its weight (1 where none is named), None where any part is. A part that raises leaves its
    group unscored: it is counted in `failed` and logged with the function, the example and the line. A part that fails on all of the
    first batch it sees raises `RewardError`: it is broken, and training would learn nothing. Close it (or use `with`) if it has workers.
    With workers, or `divide`d over the processes of a run, a function sees whole groups (responses to one prompt, next to each other),
    not the batch.

    Attributes:
      failed: rows of the last call that an exception left unscored, by part; empty if none did.
    """

    def __init__(
        self,
        functions: Mapping[str, Reward | str],
        *,
        workers: int = 0,
        timeout: float = 0.0,
        overlong: tuple[int, int, float] | None = None,
        weights: Mapping[str, float] | None = None,
        divide: Divide | None = None,
    ):
        self.failed: dict[str, int] = {}
        self._divide = divide or (lambda function, count: function(slice(0, count)))
        self._functions = {
            name: resolve(f, f"config.rewards.{name}") if isinstance(f, str) else f for name, f in functions.items()
        }
        self._specs = dict(functions)
        self._overlong, self._weights = overlong, dict(weights or {})
        self._has_worked: set[str] = set()
        if workers:
            for function in functions.values():
                name_of(function)  # refuses what another process could not import
        self._workers = Workers(workers, timeout) if workers else None
        self._num_workers, self._timeout = workers, timeout
        self._begun: dict[tuple[str, str], Future[Outcome]] = {}  # by function and group

    def __call__(
        self,
        responses: Sequence[str],
        examples: Sequence[dict[str, Any]],
        finish_reasons: Sequence[str],
        response_tokens: Sequence[int],
        limit: int | None = None,
    ) -> tuple[list[float | None], dict[str, list[float | None]]]:
        """`limit`: tokens of a response at most, where it is not the one of the settings (the overlong penalty ends there)."""
        rows = _rows(responses, examples, finish_reasons, response_tokens)
        parts: dict[str, list[float | None]] = {}
        self.failed = {}
        for name in self._functions:
            outcome = self._run(name, rows)
            self._note(name, outcome, len(rows))
            parts[name] = outcome.values
        self._begun.clear()
        if self._overlong is not None:
            most, buffer, penalty = self._overlong
            parts[OVERLONG] = list(overlong_penalties(rows.response_tokens, limit or most, buffer, penalty))
        weights = [self._weights.get(name, 1.0) for name in parts]
        return [_total(values, weights) for values in zip(*parts.values(), strict=True)], parts

    def begin(
        self,
        responses: Sequence[str],
        examples: Sequence[dict[str, Any]],
        finish_reasons: Sequence[str],
        response_tokens: Sequence[int],
    ) -> None:
        """Lets workers score whole groups while others are sampled; the call that they are a part of takes the results.

        Without workers nothing happens. What goes wrong is raised by that call.
        """
        if self._workers is None:
            return
        for group in _rows(responses, examples, finish_reasons, response_tokens).groups():
            for name in self._functions:
                self._begun[name, _key(group)] = self._submit(name, group)

    def check(self, example: dict[str, Any]) -> None:
        """One trial call on a made-up response, in this process, before device work, so that a typo shows at once."""
        rows = Rows([str(example["answer"])], [example], ["stop"], [1])
        for name, function in self._functions.items():
            outcome = apply(function, self._label(name), rows)
            if outcome.failed:
                raise RewardError(f"A trial call before training failed: {outcome.errors[0]}")

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, name: str, rows: Rows) -> Outcome:
        if not len(rows):
            return Outcome([], 0, [])
        starts = list(itertools.accumulate(map(len, rows.groups()), initial=0))
        score = lambda groups: self._score(name, rows.slice(starts[groups.start], starts[groups.stop]))
        outcomes = [Outcome(*fields) for fields in self._divide(score, len(starts) - 1)]  # may have travelled as JSON
        return Outcome(
            [value for outcome in outcomes for value in outcome.values],
            sum(outcome.failed for outcome in outcomes),
            [error for outcome in outcomes for error in outcome.errors],
        )

    def _score(self, name: str, rows: Rows) -> list[Outcome]:
        if self._workers is None:
            return [apply(self._functions[name], self._label(name), rows)]
        if self._begun:
            groups = rows.groups()
            futures = [self._begun.get((name, _key(group))) or self._submit(name, group) for group in groups]
            return [future.result() for future in futures]
        pieces = rows.groups() if self._timeout else _chunks(rows, self._num_workers)  # the limit is for a group
        return self._workers.run(self._specs[name], self._label(name), pieces)

    def _submit(self, name: str, rows: Rows) -> Future[Outcome]:
        assert self._workers is not None
        return self._workers.submit(self._specs[name], self._label(name), rows)

    def _note(self, name: str, outcome: Outcome, total: int) -> None:
        if outcome.failed < total:
            self._has_worked.add(name)
        if not outcome.failed:
            return
        if name not in self._has_worked:
            raise RewardError(f"No response could be scored: {outcome.errors[0]}")
        self.failed[name] = outcome.failed
        logger.warning("%d of %d responses left unscored: %s", outcome.failed, total, outcome.errors[0])

    def _label(self, name: str) -> str:
        function = self._specs[name]
        where = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
        return f"Reward config.rewards.{name} ({where})"


def overlong_penalties(lengths: Sequence[int], limit: int, buffer: int, penalty: float = 1.0) -> list[float]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), in tokens.

    R_len = 0 for |y| <= limit - buffer; ((limit - buffer) - |y|) / buffer up to the limit; -1 beyond; times `penalty`.
    """
    return [-penalty * min(max(length - (limit - buffer), 0) / buffer, 1.0) + 0.0 for length in lengths]


def _rows(responses, examples, finish_reasons, response_tokens) -> Rows:
    return Rows(list(responses), list(examples), list(finish_reasons), [int(n) for n in response_tokens])


def _key(rows: Rows) -> str:
    return json.dumps(vars(rows), default=str)


def _chunks(rows: Rows, count: int) -> list[Rows]:
    """At most `count` runs of whole groups, of about equal numbers of rows."""
    chunks: list[Rows] = []
    start = stop = 0
    for group in rows.groups():
        stop += len(group)
        if stop * count >= (len(chunks) + 1) * len(rows):
            chunks.append(rows.slice(start, stop))
            start = stop
    return chunks


def _total(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    scores = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(scores) if len(scores) == len(values) else None
