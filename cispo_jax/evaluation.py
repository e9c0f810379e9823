"""Held-out evaluation: greedy accuracy, avg@k, pass@k and maj@k with intervals, one record a problem, and two evaluations compared."""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import dataclasses
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from cispo_jax import distributed, storage
from cispo_jax.config import ConfigError, EvaluationSettings
from cispo_jax.estimates import bootstrap_interval, maj_at_k, paired_difference, pass_at_k, wilson_interval
from cispo_jax.types import Rollout

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Problems and how they are asked and judged.

    Attributes:
      name: "" for the run's own held-out problems; otherwise metrics are `eval/NAME/...`.
      is_correct: the data set's own scorer; a score of 1 is correct.
      verdict: (response, example) -> `right` | `wrong number` | ...
      answer_of: (response, example) -> what maj@k votes on, "" where there is no answer.
    """

    name: str
    examples: Sequence[dict[str, Any]]
    settings: EvaluationSettings
    is_correct: Callable[..., list[float | None]]
    verdict: Callable[[str, dict[str, Any]], str]
    answer_of: Callable[[str, dict[str, Any]], str]


def evaluate(
    model: Any,
    benchmark: Benchmark,
    *,
    sample: Callable[..., Rollout],
    encode: Callable[[dict[str, Any]], list[int]],
    decode: Callable[[Sequence[int]], str],
    score: Callable[..., tuple[list[float | None], Any]],
    seed: int,
    step: int,
    partial: epath.Path | None = None,
    weights: str = "",
) -> tuple[dict[str, float], list[Record]]:
    """Metrics (`summarise`) and one record a problem.

    Args:
      score: the training reward of a batch, for `eval/reward`.
      partial: a file that records are added to while the evaluation goes on. If it holds some of the same evaluation, which was killed,
        those are not computed again.
      weights: what tells these weights from others, for `partial`.
    """
    start = time.monotonic()
    settings, examples = benchmark.settings, benchmark.examples
    examples = [examples[i] for i in range(min(settings.num_problems or len(examples), len(examples)))]
    ask = _Asker(model, benchmark, len(examples), sample, encode, decode, score, seed, step)
    identity = [weights, *(str(example.get("id")) for example in examples)]
    records = _begin(partial, ask.identity(identity)) if partial is not None else []
    for first in range(len(records), len(examples), settings.batch_rows):
        chunk = ask.records(first, examples[first : first + settings.batch_rows])
        records += chunk
        if partial is not None:
            _append(partial, chunk)
    prefix = f"eval/{benchmark.name}/" if benchmark.name else "eval/"
    metrics = {prefix + name: value for name, value in summarise(records).items()}
    return metrics | {f"time/evaluate{benchmark.name and '/'}{benchmark.name}": time.monotonic() - start}, records


def summarise(records: Sequence[Record]) -> dict[str, float]:
    """The numbers of an evaluation from its records.

    `accuracy`: share of problems whose greedy response is correct, with its Wilson 95 % interval `accuracy_low`, `_high`; `reward`: mean
    training reward of those responses; `length`, `truncated`, `unscored` (problems that cannot be judged, left out of the means).
    With k samples a problem: `avg@k` (mean over problems of the mean over samples), `pass@j` for j = 1, 2, 4, ..., k, and `maj@k`, with
    95 % bootstrap intervals over problems; `sampled_length`, `sampled_truncated`. For a mixture also `accuracy/TASK` and `avg@k/TASK`.
    """
    right = [record["correct"] >= 1 for record in records if record["correct"] is not None]
    low, high = wilson_interval(sum(right), len(right))
    metrics = {
        "accuracy": sum(right) / len(right) if right else math.nan,
        "accuracy_low": low,
        "accuracy_high": high,
        "reward": _mean(r["reward"] for r in records if r["reward"] is not None),
        "length": _mean(r["tokens"] for r in records),
        "truncated": _mean(r["finish_reason"] == "length" for r in records),
        "unscored": float(len(records) - len(right)),
    }
    sampled = [record["samples"] for record in records if record.get("samples")]
    for name, values in _of_samples(records).items():
        metrics[name] = _mean(values)
        if "@" in name:
            metrics[f"{name}_low"], metrics[f"{name}_high"] = bootstrap_interval(values)
    if sampled:
        metrics["sampled_length"] = _mean(s["tokens"] for samples in sampled for s in samples)
        metrics["sampled_truncated"] = _mean(s["finish_reason"] == "length" for samples in sampled for s in samples)
    for task in sorted({record["task"] for record in records if "task" in record}):
        own = [record for record in records if record.get("task") == task]
        metrics[f"accuracy/{task}"] = _mean(r["correct"] >= 1 for r in own if r["correct"] is not None)
        metrics |= {
            f"{name}/{task}": _mean(values) for name, values in _of_samples(own).items() if name.startswith("avg@")
        }
    return metrics


def _of_samples(records: Sequence[Record]) -> dict[str, list[float]]:
    """avg@k, pass@j and maj@k of each problem that can be judged."""
    found: dict[str, list[float]] = {}
    for record in records:
        judged = [sample for sample in record.get("samples", ()) if sample["correct"] is not None]
        k = len(record.get("samples", ()))
        if not judged:
            continue
        right = [sample["correct"] >= 1 for sample in judged]
        found.setdefault(f"avg@{k}", []).append(sum(right) / len(right))
        if len(judged) < k:
            continue  # pass@k and maj@k need all of them
        for j in sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k}):
            found.setdefault(f"pass@{j}", []).append(pass_at_k(k, sum(right), j))
        if k > 1:
            answers = [sample["answer"] or None for sample in judged]
            found.setdefault(f"maj@{k}", []).append(maj_at_k(answers, right, k))
    return found


def _mean(values: Any) -> float:
    values = list(values)
    return float(np.mean(values)) if values else math.nan


@dataclasses.dataclass
class _Asker:
    """Samples and judges some problems at a time; which ones are asked together changes nothing."""

    model: Any
    benchmark: Benchmark
    total: int
    sample: Callable[..., Rollout]
    encode: Callable[[dict[str, Any]], list[int]]
    decode: Callable[[Sequence[int]], str]
    score: Callable[..., tuple[list[float | None], Any]]
    seed: int
    step: int

    def identity(self, others: Sequence[str]) -> str:
        """What decides the records, in short."""
        what = [dataclasses.asdict(self.benchmark.settings), self.benchmark.name, self.seed, self.step, *others]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def records(self, first: int, examples: list[dict[str, Any]]) -> list[Record]:
        benchmark, k = self.benchmark, self.benchmark.settings.samples
        texts, rollout = self._respond(first, examples, 0)
        reasons, lengths = rollout.finish_reasons, rollout.lengths.tolist()
        correct = self._scores(texts, examples, rollout, 1)
        # The rewards of training know the run's own problems only.
        rewards = correct if benchmark.name else self.score(texts, examples, reasons, lengths)[0]
        records = [
            {
                **{name: example[name] for name in ("id", "task", "level", "prompt", "answer") if name in example},
                "response": texts[i],
                "correct": correct[i],
                "reward": rewards[i],
                "verdict": benchmark.verdict(texts[i], example),
                "finish_reason": reasons[i],
                "tokens": lengths[i],
            }
            for i, example in enumerate(examples)
        ]
        if k:
            texts, rollout = self._respond(first, examples, k)
            reasons, lengths = rollout.finish_reasons, rollout.lengths.tolist()
            correct = self._scores(texts, [e for e in examples for _ in range(k)], rollout, k)
            for i, (record, example) in enumerate(zip(records, examples, strict=True)):
                record["samples"] = [
                    {
                        "response": texts[row],
                        "answer": benchmark.answer_of(texts[row], example),
                        "correct": correct[row],
                        "finish_reason": reasons[row],
                        "tokens": lengths[row],
                    }
                    for row in range(i * k, (i + 1) * k)
                ]
        return records

    def _respond(self, start: int, examples: list[dict[str, Any]], k: int) -> tuple[list[str], Rollout]:
        """Texts and rollout of k sampled responses to each example, or of the greedy one (k = 0), a fixed number of rows at a time."""
        settings = self.benchmark.settings
        options = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        if k:
            options = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        group_size = max(k, 1)
        per_call = max(1, settings.batch_rows // group_size)
        rollouts = []
        for first in range(0, len(examples), per_call):
            prompts = [self.encode(example) for example in examples[first : first + per_call]]
            real = len(prompts)
            prompts += prompts[-1:] * (per_call - real if self.total > per_call else 0)  # one shape, one compilation
            ids = range(start + first, start + first + len(prompts))
            rollout = self.sample(
                self.model, prompts, group_size=group_size, seed=self.seed, step=self.step, prompt_ids=ids, **options
            )
            rollouts.append(rollout.take(np.arange(real * group_size)))
        rollout = Rollout.concatenate(rollouts)
        responses = rollout.responses()
        texts = distributed.divide(lambda mine: [self.decode(ids) for ids in responses[mine]], len(responses))
        return texts, rollout

    def _scores(self, texts: list[str], examples: list[dict[str, Any]], rollout: Rollout, k: int) -> list[float | None]:
        """Each process scores its share of the problems, with all k responses to each."""
        reasons, lengths = rollout.finish_reasons, rollout.lengths.tolist()

        def score(problems: slice) -> list[float | None]:
            rows = slice(problems.start * k, problems.stop * k)
            others = {"finish_reasons": reasons[rows], "response_tokens": lengths[rows]}
            return self.benchmark.is_correct(texts[rows], examples=examples[rows], **others)

        return distributed.divide(score, len(texts) // k)


def _begin(partial: epath.Path, identity: str) -> list[Record]:
    """The records of the same evaluation that are there already; the file is begun anew if it holds another's."""

    def read() -> list[Record]:
        if partial.exists():
            lines = partial.read_text().split("\n")[:-1]  # what follows the last line break was cut off
            try:
                rows = [json.loads(line) for line in lines]
            except ValueError:
                rows = []
            if rows and rows[0] == {"evaluation": identity}:
                return rows[1:]
        partial.parent.mkdir(parents=True, exist_ok=True)
        storage.write_text(partial, json.dumps({"evaluation": identity}) + "\n")
        return []

    return distributed.gather(read() if distributed.is_main() else None)[0] or []


@distributed.main_only
def _append(partial: epath.Path, records: list[Record]) -> None:
    storage.append_text(partial, _lines(records))


@distributed.main_only
def write_records(path: epath.Path, records: list[Record], partial: epath.Path | None = None) -> None:
    """The records of a complete evaluation, in place of its partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_text(path, _lines(records))
    if partial is not None:
        partial.unlink(missing_ok=True)


def _lines(records: list[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_records(path: epath.PathLike, setting: str = "--compare") -> list[Record]:
    """The records of `write_records`.

    Raises:
      ConfigError: the file cannot be read as such, naming the line.
    """
    file = epath.Path(path)
    if not file.is_file():
        raise ConfigError(f"{setting}={path}: there is no such file; records are WORKDIR/evaluations/*.jsonl.")
    records = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            if not {"id", "correct"} <= set(record):
                raise ValueError("no `id` or no `correct`")
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{setting}={path}, line {number} is no record of an evaluation: {error}.") from None
        records.append(record)
    return records


def paired(before: Sequence[Record], after: Sequence[Record]) -> Iterator[tuple[str, dict[str, float]]]:
    """By metric (`accuracy`, `avg@k`): the difference on the problems that both have judged, with interval and p-value.

    Raises:
      ConfigError: no problem is in both.
    """
    by_id = {record["id"]: record for record in before}
    pairs = [(by_id[record["id"]], record) for record in after if record["id"] in by_id]
    if not pairs:
        raise ConfigError("The two evaluations have no problem in common (by `id`): there is nothing to compare.")
    greedy = [(a["correct"] >= 1, b["correct"] >= 1) for a, b in pairs if None not in (a["correct"], b["correct"])]
    if greedy:
        yield "accuracy", {"problems": float(len(greedy)), **paired_difference(*zip(*greedy, strict=True))}
    means = [(_sampled_mean(a), _sampled_mean(b)) for a, b in pairs]
    known = [(a, b) for a, b in means if a is not None and b is not None]
    if known:
        yield "avg", {"problems": float(len(known)), **paired_difference(*zip(*known, strict=True))}


def _sampled_mean(record: Record) -> float | None:
    scores = [sample["correct"] >= 1 for sample in record.get("samples", ()) if sample["correct"] is not None]
    return sum(scores) / len(scores) if scores else None


def compare(before: epath.Path, after: epath.Path) -> str:
    """A table of two record files: how many responses of each kind, and one response of each."""
    tables = [[json.loads(line) for line in path.read_text().splitlines()] for path in (before, after)]
    counts = [Counter(record["verdict"] for record in table) for table in tables]
    kinds = sorted(counts[0] | counts[1], key=lambda kind: (kind != "right", kind))
    lines = [f"{'held-out, greedy':<16}{'before':>14}{'after':>14}"]
    for kind in kinds:
        cells = [f"{c[kind]} ({c[kind] / max(len(t), 1):.0%})" for c, t in zip(counts, tables, strict=True)]
        lines.append(f"{kind:<16}{cells[0]:>14}{cells[1]:>14}")
    for name, table in zip(("before", "after"), tables, strict=True):
        for kind in kinds:
            record = next((r for r in table if r["verdict"] == kind), None)
            if record:
                text = " ".join(record["response"].split())
                prompt = " ".join(record["prompt"].split())
                lines.append(
                    f"  {name + ', ' + kind + ':':<22}{_short(prompt, 44)} -> {_short(text, 60)!r} (answer {record['answer']})"
                )
    return "\n".join(lines)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
