"""Held-out evaluation: greedy accuracy, avg@k with a confidence interval, and what kind of mistakes are made."""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from cispo_jax import distributed, storage
from cispo_jax.config import EvaluationSettings
from cispo_jax.types import Rollout

Interval = tuple[float, float]


def evaluate(
    model: Any,
    examples: Sequence[dict[str, Any]],
    settings: EvaluationSettings,
    *,
    sample: Callable[..., Rollout],
    encode: Callable[[dict[str, Any]], list[int]],
    decode: Callable[[Sequence[int]], str],
    score: Callable[..., tuple[list[float | None], Any]],
    verdict: Callable[[str, dict[str, Any]], str],
    is_correct: Callable[..., list[float | None]],
    seed: int,
    step: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and one record a problem.

    `eval/accuracy`: share of problems whose greedy response is correct (a score of 1 under the data set's scorer), with its Wilson 95 %
    interval `eval/accuracy_low`, `_high`; `eval/reward`: mean training reward of those responses; `eval/length`, `eval/truncated`;
    `eval/avg@k`: mean over problems of the mean over k samples, with the 95 % interval of that mean over problems.
    Problems that cannot be scored are left out of the means and counted in `eval/unscored`.
    """
    start = time.monotonic()
    examples = [examples[i] for i in range(min(settings.num_problems or len(examples), len(examples)))]
    responses, rollout = _respond(model, examples, settings, 0, sample, encode, decode, seed, step)
    lengths = rollout.lengths
    correct = _scores(is_correct, responses, examples, rollout)
    rewards, _ = score(responses, examples, rollout.finish_reasons, lengths.tolist())
    right = [value >= 1 for value in correct if value is not None]
    low, high = wilson_interval(sum(right), len(right))
    metrics = {
        "eval/accuracy": sum(right) / len(right) if right else math.nan,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/reward": float(np.mean([r for r in rewards if r is not None] or [np.nan])),
        "eval/length": float(lengths.mean()),
        "eval/truncated": float(np.mean(rollout.finish_reason == 1)),
        "eval/unscored": float(len(correct) - len(right)),
    }
    if settings.samples:
        k = settings.samples
        repeated = [example for example in examples for _ in range(k)]
        texts, sampled = _respond(model, examples, settings, k, sample, encode, decode, seed, step)
        scores = _scores(is_correct, texts, repeated, sampled, k)
        grid = np.array([np.nan if s is None else float(s >= 1) for s in scores]).reshape(-1, k)
        per_problem = np.array([row[~np.isnan(row)].mean() for row in grid if not np.isnan(row).all()])
        mean = float(per_problem.mean()) if len(per_problem) else math.nan
        half = 1.96 * float(per_problem.std(ddof=1)) / math.sqrt(len(per_problem)) if len(per_problem) > 1 else 0.0
        metrics |= {f"eval/avg@{k}": mean, f"eval/avg@{k}_low": mean - half, f"eval/avg@{k}_high": mean + half}
    metrics["time/evaluate"] = time.monotonic() - start
    records = [
        {
            "prompt": e["prompt"],
            "answer": e["answer"],
            "response": r,
            "correct": c,
            "verdict": verdict(r, e),
            "finish_reason": f,
        }
        for e, r, c, f in zip(examples, responses, correct, rollout.finish_reasons, strict=True)
    ]
    return metrics, records


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> Interval:
    """95 % confidence interval of a proportion (Wilson, 1927); (0, 1) without a trial."""
    if not trials:
        return 0.0, 1.0
    p = successes / trials
    center = p + z**2 / (2 * trials)
    half = z * math.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2))
    return max(center - half, 0.0) / (1 + z**2 / trials), min((center + half) / (1 + z**2 / trials), 1.0)


@distributed.main_only
def write_records(path: epath.Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


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


def _respond(model, examples, settings, k, sample, encode, decode, seed, step):
    """Texts and rollout of k sampled responses to each example, or of the greedy one (k = 0), a fixed number of rows at a time."""
    temperature, top_p, top_k = (settings.temperature, settings.top_p, settings.top_k) if k else (0.0, 1.0, 0)
    k = max(k, 1)
    per_call = max(1, settings.batch_rows // k)
    rollouts = []
    for first in range(0, len(examples), per_call):
        prompts = [encode(example) for example in examples[first : first + per_call]]
        real = len(prompts)
        prompts += prompts[-1:] * (per_call - real if len(examples) > per_call else 0)  # one shape, one compilation
        rollout = sample(
            model, prompts, group_size=k, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, step=step,
            prompt_ids=range(first, first + len(prompts)),
        )  # fmt: skip
        rollouts.append(rollout.take(np.arange(real * k)))
    rollout = Rollout.concatenate(rollouts)
    responses = rollout.responses()
    return distributed.divide(lambda mine: [decode(ids) for ids in responses[mine]], len(responses)), rollout


def _scores(is_correct, texts, examples, rollout: Rollout, k: int = 1) -> list[float | None]:
    """Each process scores its share of the problems, with all k responses to each."""
    reasons, lengths = rollout.finish_reasons, rollout.lengths.tolist()

    def score(problems: slice) -> list[float | None]:
        rows = slice(problems.start * k, problems.stop * k)
        return is_correct(
            texts[rows], examples=examples[rows], finish_reasons=reasons[rows], response_tokens=lengths[rows]
        )

    return distributed.divide(score, len(texts) // k)
