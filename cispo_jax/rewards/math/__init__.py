r"""A verifier of mathematical answers that a policy cannot fool: exact before approximate, and every comparison may be killed.

Where the answer is: see `cispo_jax.rewards.math.extract`. How it compares with the reference (gold):

  the same text   is right, whatever it is, spacing and LaTeX variants (\dfrac, \left, \text, ...) apart
  numbers         by exact value: 033 = 33, 29. = \$29.00 = 29, 115,000 = 115000, 2.5 = 5/2 = 2\frac{1}{2}, 0.\overline{3} = 1/3
  rounded         a decimal of at least 6 places and 6 significant digits equals a number that no decimal equals if it is off by
                  less than one in its last place: 0.0833333333 = 1/12, 3.141593 = \pi; not 0.33 = 1/3, not 3.14 = \pi
  a comma         in digit groups is a thousands mark (1,234 alone is a number), else it separates; inside brackets it always separates
  lists           all values that the gold has and no other, in any order: 1331, 1728 = "1728 and 1331"; \pm 2 = 2, -2
  tuples          (a, b) in order; a bare list 0,1 equals (0,1) in that order; (a,b] needs the same brackets; \{a, b\} any order
  percent, units  28\% = 28 = 0.28; a unit may be missing on one side, two different units are wrong; degrees and currencies are dropped
  names           x = 5, f(x) = 5, x \in A: the name may be missing on one side, two different names are wrong
  equations       by a constant factor: 2x + 4y = 3 is y = 3/4 - x/2; inequalities by a positive one, or turned round
  intervals       gold 0 < x < 5 accepts (0, 5); gold (0, 5) does not accept 0 < x < 5 (it may be a point)
  expressions     equal everywhere (exactly, or to 45 digits at points of both signs); X is not x; i is the imaginary unit, \log is base 10
  words           letter by letter, case and enclosing punctuation apart; (B) = B
  prose           a gold of more than 4 words, or one that is no formula, cannot be judged: None, unless the answer is the same text
  too much        an answer that costs more than 0.8 CPU seconds, or has numbers of more than 100,000 digits, is wrong unless it is
                  the same text

Needs `pip install 'cispo-jax[rewards]'`.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

from cispo_jax.config import ConfigError
from cispo_jax.rewards.math import compare, extract, grammar, judge
from cispo_jax.rewards.math.normal import canonical

MAX_ANSWER = 4_000  # characters
SECONDS = 1.2  # CPU seconds of all comparisons of one answer


def verify_math(response: str, gold: str) -> bool | None:
    """Whether the final answer of a response equals the reference answer, by the tables of this module and of `extract`.

    The same in any thread and process. What the comparison costs is bounded (`judge`): at most 2 s.

    Args:
      response: what the model wrote, or an answer alone.
      gold: the reference answer, with or without a box.

    Returns:
      True or False; None if the gold cannot be judged, or the comparison itself failed (counted in `judge.counts`, and logged).
    """
    return _verify(response, gold, extract.final_answer)


def verify_answer_line(response: str, gold: str) -> bool | None:
    """`verify_math` where only the last `Answer: ...` line counts, as in the prompt of DAPO (arXiv 2503.14476)."""
    return _verify(response, gold, extract.answer_line)


def math_reward(responses: list[str], *, examples: list[dict[str, Any]], **_: Any) -> list[float | None]:
    """The reward: 1.0 where `verify_math` says right, 0.0 wrong, None where the gold cannot be judged."""
    return _scores(verify_math, responses, examples)


def answer_line_reward(responses: list[str], *, examples: list[dict[str, Any]], **_: Any) -> list[float | None]:
    """The reward of `verify_answer_line`."""
    return _scores(verify_answer_line, responses, examples)


def verdicts(reward: Callable[..., Any]) -> Callable[[str, Mapping[str, Any]], str]:
    """`verdict(response, example)` of one of the two rewards: `right`, `wrong answer`, `no answer` or `not judged`."""
    verify, find = (
        (verify_math, extract.final_answer) if reward is math_reward else (verify_answer_line, extract.answer_line)
    )

    def verdict(response: str, example: Mapping[str, Any]) -> str:
        right = verify(response, str(example["answer"]))
        if right is None:
            return "not judged"
        return "right" if right else "wrong answer" if find(response) else "no answer"

    return verdict


def answers(reward: Callable[..., Any]) -> Callable[[str, Mapping[str, Any]], str]:
    """`answer(response, example)` of one of the two rewards: the normal form of the final answer, "" if there is none."""
    find = extract.final_answer if reward is math_reward else extract.answer_line
    return lambda response, example: canonical((find(response) or "")[:MAX_ANSWER])


def _scores(verify: Any, responses: list[str], examples: list[dict[str, Any]]) -> list[float | None]:
    verdicts = [verify(r, str(e.get("answer", ""))) for r, e in zip(responses, examples, strict=True)]
    return [None if right is None else float(right) for right in verdicts]


def _verify(response: str, gold: str, find: Any) -> bool | None:
    for name, value in (("response", response), ("gold", gold)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is a {type(value).__name__}; valid: str")
    require()
    same, text = _canonical_gold(gold)
    if not same:
        return None
    answer = find(response)
    if answer is not None:
        answer = " ".join(answer.split())
        if len(answer) <= max(MAX_ANSWER, 2 * len(gold)) and canonical(answer) == same:
            return True
    try:
        reference = _reference(text)
        if reference is None:
            return None
        if answer is None or len(answer) > MAX_ANSWER:
            return False
        node = grammar.parse(answer)
        return node is not None and compare.equal(reference, node, _asker())
    except (grammar.TooComplex, judge.Late):
        return False
    except judge.JudgeError:
        return None


@functools.lru_cache(maxsize=4096)
def _canonical_gold(gold: str) -> tuple[str, str]:
    text = extract.gold_answer(gold)
    return canonical(text), text


@functools.lru_cache(maxsize=4096)
def _reference(text: str) -> grammar.Node | None:
    """A gold's structure; None if it cannot be judged."""
    if len(text) > MAX_ANSWER:
        return None
    try:
        node = grammar.parse(text)
        return node if compare.readable(node, _asker()) else None
    except (grammar.TooComplex, judge.Late):
        return None


def _asker() -> compare.Ask:
    """`judge.ask` with what is left of the time of one answer."""
    used = 0.0

    def ask(kind: str, arguments: list[Any]) -> Any:
        nonlocal used
        left = SECONDS - used
        if left <= 0.05:
            raise judge.Late("all comparisons of one answer")
        before = time.monotonic()
        try:
            return judge.ask(kind, arguments, min(left, judge.CPU_SECONDS))
        finally:
            used += time.monotonic() - before

    return ask


@functools.cache
def require() -> None:
    """Refuses early where math-verify's parser is not installed."""
    if importlib.util.find_spec("latex2sympy2_extended") is None:
        raise ConfigError("The verifier of mathematics needs math-verify: pip install 'cispo-jax[rewards]'.")
