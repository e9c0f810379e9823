"""Held-out evaluation: accuracy whatever the batch size, avg@k, the interval, problems without a score, the table."""

import json

import numpy as np
import pytest

from cispo_jax.config import EvaluationSettings
from cispo_jax.evaluation import compare, evaluate, wilson_interval, write_records
from cispo_jax.types import Rollout


class Sampler:
    """Answers problem i with the token i (greedy) or, as sample g, with i if g < i % (k + 1); notes how it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, model, prompts, *, group_size, temperature, top_p, top_k, seed, step, prompt_ids):
        self.calls.append((len(prompts), group_size, temperature, top_p, top_k, list(prompt_ids)))
        values = []
        for prompt, _ in zip(prompts, prompt_ids, strict=True):
            for g in range(group_size):
                values.append(prompt[0] if temperature == 0 or g < prompt[0] % (group_size + 1) else 99)
        B = len(values)
        ones = np.ones((B, 1), bool)
        tokens = np.array(values, np.int32)[:, None]
        return Rollout(tokens, ones, tokens, ones, ones, -ones.astype(np.float32), (tokens[:, 0] % 2).astype(np.int8))


def right(responses, *, examples, finish_reasons, response_tokens):
    assert len(responses) == len(examples) == len(finish_reasons) == len(response_tokens)
    return [None if e["answer"] is None else float(r == e["answer"]) for r, e in zip(responses, examples, strict=True)]


def run(count=30, right_until=24, unscored=(), **settings):
    examples = [
        {"id": str(i), "prompt": f"p{i}", "answer": None if i in unscored else str(i) if i < right_until else "x"}
        for i in range(count)
    ]
    sampler = Sampler()
    metrics, records = evaluate(
        None, examples, EvaluationSettings(**settings), sample=sampler, encode=lambda e: [int(e["id"])],
        decode=lambda ids: str(ids[0]), score=lambda responses, *_: ([0.5] * len(responses), {}),
        verdict=lambda r, e: "right" if r == e["answer"] else "wrong", is_correct=right, seed=3, step=5,
    )  # fmt: skip
    return metrics, records, sampler


@pytest.mark.parametrize("batch_rows", [1, 7, 8, 16, 29, 30, 31, 128])
def test_accuracy_is_the_same_for_every_batch_size(batch_rows):
    """30 problems, the first 24 right, the last 6 wrong: 0.8, with no partial batch dropped or given a full one's weight (O-39)."""
    metrics, records, sampler = run(batch_rows=batch_rows)
    assert metrics["eval/accuracy"] == 0.8
    assert [r["prompt"] for r in records] == [f"p{i}" for i in range(30)]
    assert sum(r["correct"] for r in records) == 24
    assert metrics["eval/truncated"] == 0.5 and metrics["eval/length"] == 1 and metrics["eval/reward"] == 0.5
    assert len({call[0] for call in sampler.calls}) == 1  # one shape, one compilation
    ids = [i for call in sampler.calls for i in call[-1]]
    assert ids[:30] == list(range(30))
    assert all(call[1:5] == (1, 0.0, 1.0, 0) for call in sampler.calls)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("batch_rows", [1, 4, 9, 200])
def test_avg_at_k_is_the_mean_over_problems_of_the_mean_over_samples(k, batch_rows):
    metrics, _, sampler = run(samples=k, batch_rows=batch_rows, temperature=0.7, top_p=0.9, top_k=5)
    per_problem = np.array([(i % (k + 1)) / k if i < 24 else 0.0 for i in range(30)])
    np.testing.assert_allclose(metrics[f"eval/avg@{k}"], per_problem.mean())
    half = 1.96 * per_problem.std(ddof=1) / np.sqrt(30)
    np.testing.assert_allclose(metrics[f"eval/avg@{k}_low"], per_problem.mean() - half)
    np.testing.assert_allclose(metrics[f"eval/avg@{k}_high"], per_problem.mean() + half)
    sampled = [call for call in sampler.calls if call[2] != 0]
    assert sampled and all(call[1:5] == (k, 0.7, 0.9, 5) for call in sampled)
    assert all(call[0] * k <= max(batch_rows, k) for call in sampled)


def test_problems_without_a_score_are_counted_and_left_out():
    metrics, records, _ = run(unscored=(0, 1, 29), samples=2)
    assert metrics["eval/unscored"] == 3
    np.testing.assert_allclose(metrics["eval/accuracy"], 22 / 27)
    kept = [(i % 3) / 2 if i < 24 else 0.0 for i in range(2, 29)]
    np.testing.assert_allclose(metrics["eval/avg@2"], np.mean(kept))
    assert records[0]["correct"] is None


def test_nothing_scored_is_no_accuracy_of_zero_by_silence():
    metrics, _, _ = run(count=4, unscored=(0, 1, 2, 3), samples=2)
    assert metrics["eval/unscored"] == 4
    assert (metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]) == (0, 1)


def test_num_problems_takes_the_first_ones_and_zero_takes_all():
    assert len(run(num_problems=7)[1]) == 7
    assert len(run(num_problems=0)[1]) == 30
    assert len(run(num_problems=300)[1]) == 30


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (5, 10), (10, 10), (64, 256), (1, 1), (148, 256)])
def test_wilson_interval_ends_where_the_score_test_does(successes, trials):
    """The p with |successes/trials - p| = z sqrt(p (1 - p) / trials), found as the roots of that quadratic."""
    share, z2 = successes / trials, 1.96**2 / trials
    expected = np.clip(np.sort(np.roots([1 + z2, -2 * share - z2, share**2]).real), 0, 1)
    low, high = wilson_interval(successes, trials)
    np.testing.assert_allclose((low, high), expected, atol=1e-9)
    assert 0 <= low <= high <= 1


def test_wilson_interval_known_values():
    np.testing.assert_allclose(wilson_interval(5, 10), (0.2366, 0.7634), atol=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_the_table_counts_kinds_and_shows_one_of_each(tmp_path):
    from etils import epath

    make = lambda verdicts: [
        {
            "prompt": f"What is {i}?",
            "answer": "4",
            "response": f"say\n{v}",
            "correct": 0,
            "verdict": v,
            "finish_reason": "stop",
        }
        for i, v in enumerate(verdicts)
    ]
    before, after = epath.Path(tmp_path) / "e/a.jsonl", epath.Path(tmp_path) / "e/b.jsonl"
    write_records(before, make(["no number", "wrong number", "right", "no number"]))
    write_records(after, make(["right", "right", "right", "wrong number"]))
    assert json.loads(before.read_text().splitlines()[0])["verdict"] == "no number"
    lines = compare(before, after).splitlines()
    table = {line.rsplit(maxsplit=4)[0]: line.split()[-4:] for line in lines[1:4]}
    assert table == {
        "right": ["1", "(25%)", "3", "(75%)"],
        "no number": ["2", "(50%)", "0", "(0%)"],
        "wrong number": ["1", "(25%)", "1", "(25%)"],
    }
    shown = [line for line in lines[4:] if "->" in line]
    assert len(shown) == 5 and all("(answer 4)" in line for line in shown)
    assert any("before, no number:" in line and "say no number" in line for line in shown)
