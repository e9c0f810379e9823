"""Finding the answer in a response and telling right from wrong."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cispo_jax.data import tasks
from cispo_jax.rewards import ReasoningGymScorer, exact_match, extract_answer, verdict


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        # Numbers by value.
        ("033", "33", "right"),
        ("033", "330", "wrong number"),
        ("16", "016", "right"),
        ("000", "0", "right"),
        ("29", "$29.00", "right"),
        ("29", "\\$29.00", "right"),
        ("29", "29.", "right"),
        ("28%", "28", "right"),
        ("115,000", "115000", "right"),
        ("115000", "It is 115,000.", "right"),
        ("0", "-0", "right"),
        ("7", "+7", "right"),
        ("0.5", ".5", "right"),
        ("2.9e1", "29", "right"),
        ("0.0017", "it is 1.7e-3.", "right"),
        ("1000", "1E3", "right"),
        ("5", "0x1e5f or 5", "right"),
        ("3", "1e99999 is not 3", "right"),
        ("0.3", "0.30000000000000004", "wrong number"),
        ("12345678901234567890", "12345678901234567891", "wrong number"),
        # Commas that are not thousands marks.
        ("3,5,7", "357", "wrong answer"),
        ("3,5,7", "3, 5, 7", "right"),
        ("357", "3,5,7", "wrong number"),
        ("7", "3,5,7", "right"),
        ("234", "1,234", "wrong number"),
        ("4567", "1234,4567", "right"),
        # Signs.
        ("-5", "The result is -5", "right"),
        ("-5", "7 - 12 = \u22125.", "right"),
        ("5", "7 - 12 = -5", "wrong number"),
        ("5", "17-12=5", "right"),
        ("12", "17 -12", "right"),
        ("-12", "17 -12", "wrong number"),
        ("-5", "(2) -5", "wrong number"),
        ("19", "- 19", "right"),  # a list item, not a negative number
        ("-19", "- 19", "wrong number"),
        # The last number counts, and none is none.
        ("19", "12 + 7 = 19", "right"),
        ("19", "12 + 7 is 18, no, 19", "right"),
        ("19", "19, I think; 12 and 7", "wrong number"),
        ("19", "nineteen", "no number"),
        ("19", "", "no number"),
        ("72", "The total is 72 clips, altogether.", "right"),
        ("73", "437 + 2*234 = 905 ... Final Answer: **73**", "right"),
        # Marks come before everything else.
        ("19", "Answer: 19\nI added 12 and 7.", "right"),
        ("19", "**Answer:** 19", "right"),
        ("19", "The final answer is: 19. Bye 5", "wrong number"),
        ("42", "#### 42\n" + "and so on 7 " * 40, "right"),
        ("42", "#### 41\nAnswer: 42\nthat is 40", "right"),
        ("42", "Answer:\n42\n41", "right"),
        ("42", "Answer: 41\nAnswer: 42", "right"),
        ("42", "<answer>42</answer> Answer: 41", "right"),
        ("42", "<answer>41</answer> <answer>42</answer>", "right"),
        ("42", "<think>hmm</think><answer>\\boxed{42}</answer>", "right"),
        ("42", "<answer>42", "right"),
        ("4", "first \\boxed{35 cm} then, after correction, \\boxed{4}, not 3", "right"),
        ("1/2", "so \\boxed{\\frac{1}{2}} it is", "wrong answer"),
        ("\\frac{1}{2}", "so \\boxed{\\frac{1}{2}} it is", "right"),
        ("\\frac{1}{2}", "so \\boxed{\\frac{1}{3}} it is", "wrong answer"),
        ("5", "\\boxed{5", "right"),  # never closed: no box, the last number
        # Text.
        ("Paris", "Let me see.\n paris. ", "right"),
        ("Paris", "It is Paris", "wrong answer"),
        ("Paris", 'Answer: "Paris"', "right"),
        ("Paris", "Answer: **Paris**", "right"),
        ("Paris", "  ", "no answer"),
        ("[2,5)", "[2, 5)", "right"),
        ("[2,5)", "(2,5)", "wrong answer"),
        ("two words", "two   words", "right"),
        ("a\nb", "Answer:\na\nb", "right"),
        ("a\nb", "look:\na\nb\n", "right"),
        ("a\nb", "b", "wrong answer"),
    ],
)
def test_verdict(gold, response, expected):
    assert verdict(response, {"answer": gold}) == expected
    assert exact_match([response], examples=[{"answer": gold}]) == [float(expected == "right")]


def test_an_example_without_an_answer_is_unscored():
    assert exact_match(["5", "5"], examples=[{"answer": ""}, {"answer": "5"}]) == [None, 1.0]


@given(
    st.integers(-(10**30), 10**30), st.sampled_from(["{}", "so {}.", "**{}**", "\\boxed{{{}}}", "Answer: {:,}", "= {}"])
)
def test_every_integer_is_found_in_its_usual_wrappings(number, wrapping):
    assert verdict(wrapping.format(number), {"answer": str(number)}) == "right"
    assert verdict(wrapping.format(number + 1), {"answer": str(number)}) == "wrong number"


@given(st.text(max_size=200), st.text(min_size=1, max_size=20))
def test_no_text_breaks_the_rule(response, gold):
    answer = extract_answer(response, gold)
    assert isinstance(answer, str)
    assert verdict(response, {"answer": gold}) in {"right", "wrong number", "no number", "wrong answer", "no answer"}


def test_long_numbers_cost_little():
    """int() refuses more than 4,300 digits, and a policy may write as many as it has tokens."""
    digits = "9" * 20_000
    assert verdict(digits, {"answer": "9"}) == "wrong number"
    assert verdict(digits, {"answer": digits}) == "right"


@pytest.fixture(scope="module")
def chain_sum():
    return tasks.reasoning_gym("chain_sum", {"max_terms": 3}, train_size=8, eval_size=4, seed=1)


def test_reasoning_gym_scores_full_marks_only(chain_sum):
    scorer = ReasoningGymScorer("chain_sum", {"max_terms": 3})
    example = chain_sum.train[0]
    gold = example["answer"]
    responses = [gold, f"Answer: {gold}.00", f"First 1.\nAnswer: {gold}", f"{gold} or so: 1{gold}", "", "none"]
    assert scorer(responses, examples=[example] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert [scorer.verdict(r, example) for r in responses[2:]] == ["right", "wrong number", "no number", "no number"]


def test_reasoning_gym_partial_credit_is_not_a_reward():
    made = tasks.reasoning_gym("spell_backward", {}, train_size=2, eval_size=2, seed=0)
    scorer, example = ReasoningGymScorer("spell_backward"), made.train[0]
    wrapped = f"the word {example['answer']} is it"
    entry = {"question": example["prompt"], "answer": example["answer"], "metadata": json.loads(example["metadata"])}
    partial = tasks.reasoning_gym_dataset("spell_backward", {}, seed=0, size=1).score_answer(wrapped, entry)
    assert 0 < partial < 1  # what the package gives
    assert scorer([wrapped, f"Answer: {example['answer']}"], examples=[example] * 2) == [0.0, 1.0]
    assert scorer.verdict(wrapped, example) == "wrong answer"


def test_a_scorer_that_raises_leaves_the_answer_unscored_and_says_so(caplog):
    made = tasks.reasoning_gym("prime_factorization", {}, train_size=2, eval_size=2, seed=0)
    scorer, example = ReasoningGymScorer("prime_factorization"), made.train[0]
    from cispo_jax.rewards import scoring

    scoring._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        values = scorer(["Answer: two times three", f"Answer: {example['answer']}"], examples=[example] * 2)
    assert values == [None, 1.0]
    assert "prime_factorization raised ValueError" in caplog.text
    assert scorer.verdict("Answer: two times three", example) == "wrong answer"


def test_missing_package_says_how_to_install(monkeypatch):
    import sys

    from cispo_jax.config import ConfigError
    from cispo_jax.rewards.scoring import import_reasoning_gym

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'cispo-jax\[rewards\]'"):
        import_reasoning_gym()
