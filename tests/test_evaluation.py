"""Held-out evaluation: accuracy whatever the batch size, avg@k, the interval, problems without a score, the table."""

import itertools
import json
import random

import numpy as np
import pytest

from cispo_jax.config import ConfigError, EvaluationSettings
from cispo_jax.estimates import bootstrap_interval, maj_at_k, paired_difference, pass_at_k, wilson_interval
from cispo_jax.evaluation import Benchmark, compare, evaluate, paired, read_records, summarise, write_records
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


def run(count=30, right_until=24, unscored=(), sampler=None, partial=None, name="", **settings):
    examples = [
        {"id": str(i), "prompt": f"p{i}", "answer": None if i in unscored else str(i) if i < right_until else "x"}
        for i in range(count)
    ]
    sampler = sampler or Sampler()
    verdict = lambda r, e: "right" if r == e["answer"] else "wrong"
    benchmark = Benchmark(name, examples, EvaluationSettings(**settings), right, verdict, lambda r, e: r)
    metrics, records = evaluate(
        None, benchmark, sample=sampler, encode=lambda e: [int(e["id"])], decode=lambda ids: str(ids[0]),
        score=lambda responses, *_: ([0.5] * len(responses), {}), seed=3, step=5, partial=partial,
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
    low, high = metrics[f"eval/avg@{k}_low"], metrics[f"eval/avg@{k}_high"]
    half = 1.96 * per_problem.std() / np.sqrt(30)
    np.testing.assert_allclose((low, high), (per_problem.mean() - half, per_problem.mean() + half), atol=0.02)
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


def table_of(rng, problems, samples):
    """Answers of each sample, of few kinds and sometimes none, and which are correct: always the same one, "0" (or "00")."""
    answers = [[rng.choice(["0", "00", "1", "2", None]) for _ in range(samples)] for _ in range(problems)]
    return answers, [[a in ("0", "00") for a in row] for row in answers]


def majority_by_counting(answers, right):
    votes = {}
    for answer, correct in zip(answers, right, strict=True):
        if answer is not None:
            key = "right" if correct else answer
            votes[key] = votes.get(key, 0) + 1
    most = max(votes.values(), default=0)
    return bool(most) and [key for key, count in votes.items() if count == most] == ["right"]


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_and_majority_equal_brute_force(samples):
    rng = random.Random(samples)
    for answers, right in zip(*table_of(rng, 40, samples), strict=True):
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(range(samples), k))
            passed = np.mean([any(right[i] for i in subset) for subset in subsets])
            won = np.mean([majority_by_counting([answers[i] for i in s], [right[i] for i in s]) for s in subsets])
            np.testing.assert_allclose(pass_at_k(samples, sum(right), k), passed)
            np.testing.assert_allclose(maj_at_k(answers, right, k), won)


def test_pass_and_majority_of_the_reports():
    """n = 4, c = 1: 0.25, 0.5, 1; [A, A, B, C] wins, a four-way tie does not (O-39)."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert maj_at_k(list("AABC"), [True, True, False, False], 4) == 1
    assert maj_at_k(list("ABCD"), [True, False, False, False], 4) == 0
    assert maj_at_k([None, None], [False, False], 2) == 0
    for call in (lambda: pass_at_k(4, 1, 5), lambda: pass_at_k(4, 1, 0), lambda: maj_at_k(["A"], [True], 2)):
        with pytest.raises(ValueError, match="valid: 1 to the number of samples"):
            call()
    with pytest.raises(ValueError, match="num_correct is 5"):
        pass_at_k(4, 5, 1)


def test_what_the_samples_say_is_reported():
    metrics, records, _ = run(samples=4)
    right = [[s["correct"] for s in record["samples"]] for record in records]
    for j in (1, 2, 4):
        np.testing.assert_allclose(metrics[f"eval/pass@{j}"], np.mean([pass_at_k(4, int(sum(r)), j) for r in right]))
    np.testing.assert_allclose(metrics["eval/maj@4"], np.mean([sum(r) > 2 for r in right]))  # wrong answers are all 99
    assert metrics["eval/maj@4_low"] <= metrics["eval/maj@4"] <= metrics["eval/maj@4_high"]
    assert metrics["eval/sampled_length"] == 1
    assert set(records[0]) == {
        "id",
        "prompt",
        "answer",
        "response",
        "correct",
        "reward",
        "verdict",
        "finish_reason",
        "tokens",
        "samples",
    }
    assert all(name.startswith("eval/aime/") for name in run(name="aime", samples=2)[0] if not name.startswith("time/"))


def test_tasks_of_a_mixture_have_their_own_numbers():
    sample = lambda c: {"correct": c, "answer": "", "finish_reason": "stop", "tokens": 1}
    record = lambda task, c, s: {
        "task": task, "correct": c, "reward": c, "tokens": 1, "finish_reason": "stop", "samples": [sample(x) for x in s],
    }  # fmt: skip
    found = summarise([record("a", 1.0, [1, 0]), record("a", 0.0, [0, 0]), record("b", 1.0, [1, 1])])
    assert (found["accuracy/a"], found["accuracy/b"]) == (0.5, 1.0)
    assert (found["avg@2/a"], found["avg@2/b"], found["avg@2"]) == (0.25, 1.0, 0.5)


@pytest.mark.parametrize("killed_after", [1, 2, 5, 7])
def test_a_killed_evaluation_goes_on(tmp_path, killed_after):
    from etils import epath

    class Killed(Sampler):
        def __call__(self, *args, **options):
            if len(self.calls) == killed_after:
                raise KeyboardInterrupt
            return super().__call__(*args, **options)

    options = {"samples": 2, "batch_rows": 8}
    whole_metrics, whole, _ = run(**options)
    partial = epath.Path(tmp_path) / "e/x.partial.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(sampler=Killed(), partial=partial, **options)
    kept = len(partial.read_text().splitlines()) - 1
    with partial.open("a") as file:
        file.write('{"id": "cut o')
    metrics, records, sampler = run(partial=partial, **options)
    assert records == whole
    assert {k: v for k, v in metrics.items() if "time" not in k} == {
        k: v for k, v in whole_metrics.items() if "time" not in k
    }
    assert min(i for call in sampler.calls for i in call[-1]) == kept == (killed_after // 3) * 8
    write_records(partial.with_name("x.jsonl"), records, partial)
    assert not partial.exists() and read_records(partial.with_name("x.jsonl")) == records


def test_another_evaluation_does_not_go_on_from_this_one(tmp_path):
    from etils import epath

    partial = epath.Path(tmp_path) / "x.partial.jsonl"
    run(partial=partial, batch_rows=8)
    assert len(run(partial=partial, batch_rows=8, right_until=10, samples=1)[2].calls) > 4
    assert not run(partial=partial, batch_rows=8, right_until=10, samples=1)[2].calls


def test_two_evaluations_are_compared_problem_by_problem(tmp_path):
    make = lambda rights: [
        {"id": str(i), "correct": float(r), "samples": [{"correct": float(r)}]} for i, r in enumerate(rights)
    ]
    before, after = make([0] * 20 + [1] * 10), make([1] * 18 + [0] * 2 + [1] * 10)
    found = dict(paired(before, list(reversed(after))))
    np.testing.assert_allclose(found["accuracy"]["difference"], 0.6)
    assert found["accuracy"]["low"] < 0.6 < found["accuracy"]["high"] and found["accuracy"]["p_value"] < 0.001
    assert found["avg"] == found["accuracy"]
    same = dict(paired(before, before))
    assert (same["accuracy"]["difference"], same["accuracy"]["p_value"]) == (0.0, 1.0)
    with pytest.raises(ConfigError, match="no problem in common"):
        dict(paired(before, [{"id": "other", "correct": 1.0}]))
    file = tmp_path / "r.jsonl"
    file.write_text('{"id": 1, "correct": 1}\n{"id": 2}\n')
    with pytest.raises(ConfigError, match="line 2 is no record"):
        read_records(file)
    with pytest.raises(ConfigError, match="no such file"):
        read_records(tmp_path / "missing.jsonl")


def test_the_sign_flip_test_is_exact_for_few_problems():
    """Three differences of +1: 2 of the 8 sign patterns are as extreme."""
    np.testing.assert_allclose(paired_difference([0, 0, 0], [1, 1, 1])["p_value"], 2 / 8)


def test_bootstrap_of_a_constant_and_of_nothing():
    assert bootstrap_interval([1.0, 1.0, 1.0]) == (1.0, 1.0)
    assert all(np.isnan(bootstrap_interval([])))
