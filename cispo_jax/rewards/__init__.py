"""Rewards: verifiable scores of responses. Nothing here imports jax, so a worker starts in a fraction of a second.

A reward is a function `reward(responses: list[str], *, examples: list[dict], finish_reasons: list[str],
response_tokens: list[int]) -> list[float | None]`: one number a response, None (or NaN) where it cannot tell
("unscored": the response leaves the statistics of its group and gets advantage 0; it is never counted as 0).
"""

from cispo_jax.rewards.functions import load_function, resolve
from cispo_jax.rewards.math import answer_line_reward, math_reward, verify_answer_line, verify_math
from cispo_jax.rewards.mixed import MixedScorer, answer_of, verdict_of
from cispo_jax.rewards.scorer import RewardError, Scorer, build, overlong_penalties
from cispo_jax.rewards.scoring import ReasoningGymScorer, exact_match, extract_answer, verdict

# What `config.rewards.verifier` can be; "auto" is the data set's own.
VERIFIERS = {"exact": exact_match, "math": math_reward, "answer_line": answer_line_reward}

__all__ = [
    "VERIFIERS",
    "MixedScorer",
    "ReasoningGymScorer",
    "RewardError",
    "Scorer",
    "answer_line_reward",
    "answer_of",
    "build",
    "exact_match",
    "extract_answer",
    "load_function",
    "math_reward",
    "overlong_penalties",
    "resolve",
    "verdict",
    "verdict_of",
    "verify_answer_line",
    "verify_math",
]
