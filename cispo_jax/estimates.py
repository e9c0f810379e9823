"""What k samples of each problem say about a model: avg@k, pass@k, maj@k, and how sure one can be. Plain NumPy and SciPy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

Interval = tuple[float, float]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that k of the samples, drawn without replacement, hold a correct one: 1 - C(n - c, k) / C(n, k).

    The unbiased estimate of Chen et al. (arXiv 2107.03374, Eq. 1).

    Args:
      num_samples: n, of one problem.
      num_correct: c of them.

    Raises:
      ValueError: k is larger than n or below 1, c is not in 0..n.
    """
    _check(num_samples, k)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct is {num_correct}; valid: 0 to num_samples = {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The probability that the majority of k of the samples, drawn without replacement, is correct.

    All correct answers count as one, other answers are the same if they are equal; None (no answer) does not vote. A tie is not a win, nor
    is a draw without a vote.

    Raises:
      ValueError: k is larger than the number of samples or below 1.
    """
    _check(len(answers), k)
    votes: dict[Hashable, int] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None or is_correct:
            key = ("right",) if is_correct else ("wrong", answer)
            votes[key] = votes.get(key, 0) + 1
    right = votes.pop(("right",), 0)
    silent = len(answers) - right - sum(votes.values())
    wins = 0
    for own in range(1, min(right, k) + 1):
        # Ways to draw the other k - own samples so that no wrong answer comes `own` times: coefficients of a product of polynomials.
        ways = [math.comb(silent, i) for i in range(min(silent, k - own) + 1)]
        for count in votes.values():
            fewer = [math.comb(count, i) for i in range(min(count, own - 1, k - own) + 1)]
            ways = _product(ways, fewer, k - own)
        wins += math.comb(right, own) * (ways[k - own] if len(ways) > k - own else 0)
    return wins / math.comb(len(answers), k)


def bootstrap_interval(values: Sequence[float], *, resamples: int = 10_000, seed: int = 0) -> Interval:
    """The 95 % percentile interval of the mean, resampling problems; (mean, mean) of fewer than two."""
    from scipy import stats

    data = np.asarray(values, float)
    if len(data) < 2 or np.all(data == data[0]):
        mean = float(data.mean()) if len(data) else math.nan
        return mean, mean
    found = stats.bootstrap(
        (data,), np.mean, n_resamples=resamples, method="percentile", batch=1000, rng=np.random.default_rng(seed)
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """The mean of after - before over the same problems, its 95 % bootstrap interval, and the p-value of no difference.

    The test changes the signs of the differences (a permutation within pairs): exactly for few problems, else 10,000 times at random.
    """
    from scipy import stats

    difference = np.asarray(after, float) - np.asarray(before, float)
    low, high = bootstrap_interval(difference)
    p_value = 1.0
    changed = difference[difference != 0]  # the signs of the others say nothing
    if len(changed):
        test = stats.permutation_test(
            (changed,), np.sum, permutation_type="samples", n_resamples=10_000, rng=np.random.default_rng(0)
        )
        p_value = float(test.pvalue)
    return {"difference": float(difference.mean()), "low": low, "high": high, "p_value": p_value}


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> Interval:
    """95 % confidence interval of a proportion (Wilson, 1927); (0, 1) without a trial."""
    if not trials:
        return 0.0, 1.0
    p = successes / trials
    center = p + z**2 / (2 * trials)
    half = z * math.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2))
    return max(center - half, 0.0) / (1 + z**2 / trials), min((center + half) / (1 + z**2 / trials), 1.0)


def _product(a: list[int], b: list[int], degree: int) -> list[int]:
    out = [0] * (min(len(a) + len(b) - 2, degree) + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: len(out) - i]):
            out[i + j] += x * y
    return out


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}; valid: 1 to the number of samples = {num_samples}")
