"""Generated problems: right answers, worked demonstrations, no leak from training into evaluation."""

import json
import re

import pytest

from cispo_jax.config import ConfigError
from cispo_jax.data import tasks
from cispo_jax.data.tasks import ArithmeticOptions, arithmetic, assert_disjoint, column_steps, options_from
from cispo_jax.rewards import ReasoningGymScorer, exact_match

SIZES = {"train_size": 60, "eval_size": 20, "seed": 0}


def evaluate(prompt: str) -> int:
    expression = re.sub(r"[^0-9+ -]", "", prompt)
    return sum(int(term) for term in re.sub(r"\s+", "", expression).replace("-", "+-").split("+"))


@pytest.mark.parametrize("style", ["plain", "steps"])
@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize("allow_negative", [False, True])
def test_arithmetic_is_right_and_demonstrations_score_full_marks(style, terms, allow_negative):
    options = ArithmeticOptions(terms=terms, style=style, allow_negative=allow_negative, max_value=60)
    made = arithmetic(options, **SIZES)
    assert (len(made.train), len(made.evaluation)) == (60, 20)
    for problem in made.train + made.evaluation:
        assert int(problem["answer"]) == evaluate(problem["prompt"])
        assert problem["prompt"].startswith("What is ") and problem["prompt"].endswith("?")
        assert len(problem["operands"]) == terms and all(2 <= n <= 60 for n in problem["operands"])
    assert allow_negative == any(p["answer"].startswith("-") for p in made.train)
    responses = [problem["response"] for problem in made.train]
    assert exact_match(responses, examples=made.train) == [1.0] * 60
    assert exact_match(responses[1:] + responses[:1], examples=made.train) != [1.0] * 60
    prompts = [p["prompt"] for p in made.train + made.evaluation]
    assert len(set(prompts)) == len(prompts)
    assert len({p["id"] for p in made.train + made.evaluation}) == len(prompts)


@pytest.mark.parametrize(("share", "terms"), [(0.0, 2), (0.3, 2), (0.7, 3), (1.0, 2)])
def test_mixed_demonstrations_hold_a_share_of_plain_ones(share, terms):
    """Each is exactly the plain or the worked one of its problem, whatever else is in the set."""
    make = lambda style, size=300, **options: (
        arithmetic(
            ArithmeticOptions(style=style, terms=terms, max_value=60, **options), train_size=size, eval_size=20, seed=0
        ).train
    )
    mixed, plain, steps = make("mixed", plain_share=share), make("plain"), make("steps")
    assert [p["prompt"] for p in mixed] == [p["prompt"] for p in plain] == [p["prompt"] for p in steps]
    kinds = [m["response"] == p["response"] for m, p in zip(mixed, plain, strict=True)]
    assert all(
        m["response"] == (p if k else s)["response"] for m, p, s, k in zip(mixed, plain, steps, kinds, strict=True)
    )
    assert abs(sum(kinds) - 300 * share) <= 4 * (300 * share * (1 - share)) ** 0.5  # four standard deviations
    again = {p["prompt"]: p["response"] for p in make("mixed", 100, plain_share=share)}
    assert all(again.get(p["prompt"], p["response"]) == p["response"] for p in mixed)


@pytest.mark.parametrize(
    "options",
    [ArithmeticOptions(), ArithmeticOptions(max_value=9, min_value=0), ArithmeticOptions(max_value=5000, terms=3)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_operands_never_meet_in_training(options, seed):
    made = arithmetic(options, train_size=300, eval_size=50, seed=seed)
    held_out = {tuple(sorted(problem["operands"])) for problem in made.evaluation}
    trained = {tuple(sorted(problem["operands"])) for problem in made.train}
    assert held_out and trained and not held_out & trained
    assert made == arithmetic(options, train_size=300, eval_size=50, seed=seed)
    assert made != arithmetic(options, train_size=300, eval_size=50, seed=seed + 2)


def test_a_leak_is_noticed():
    with pytest.raises(AssertionError, match=r"such as \(3, 4\)"):
        assert_disjoint([{"operands": [4, 3]}], [{"operands": [3, 4]}])


def test_a_range_too_small_is_refused_with_its_options():
    with pytest.raises(
        ConfigError, match=r"config\.data\.eval_size=256.*min_value=2, max_value=9, terms=2.*36 sets of operands"
    ):
        arithmetic(ArithmeticOptions(max_value=9), train_size=1000, eval_size=256, seed=0)


def test_a_range_without_a_valid_problem_ends():
    options = ArithmeticOptions(
        operations="-", terms=4, min_value=5000, max_value=9000
    )  # a - b - c - d is always negative
    with pytest.raises(ConfigError, match="too few different problems"):
        arithmetic(options, train_size=5, eval_size=5, seed=0)


def test_small_ranges_give_what_there_is():
    made = arithmetic(ArithmeticOptions(max_value=20), train_size=4096, eval_size=256, seed=0)
    assert len(made.evaluation) == 256
    assert 250 < len(made.train) < 400
    # Both orders of a sum and the one difference that is not negative, of each set of operands left for training.
    assert len(made.train) == sum(3 if a != b else 2 for a, b in {tuple(sorted(p["operands"])) for p in made.train})


@pytest.mark.parametrize(
    ("a", "sign", "b", "steps"),
    [
        (47, "+", 38, "7+8=15, 4+3+1=8, 85"),
        (95, "+", 38, "5+8=13, 9+3+1=13, 133"),
        (7, "+", 120, "7+0=7, 0+2=2, 0+1=1, 127"),
        (120, "+", 7, "0+7=7, 2+0=2, 1+0=1, 127"),
        (52, "-", 38, "12-8=4, 5-3-1=1, 14"),
        (100, "-", 1, "10-1=9, 10-0-1=9, 1-0-1=0, 99"),
        (3, "-", 10, "10-3=7, 1-0-1=0, -7"),
        (5, "-", 5, "5-5=0, 0"),
    ],
)
def test_column_steps(a, sign, b, steps):
    assert column_steps(a, sign, b) == steps


def test_columns_spell_the_result():
    for a in range(0, 130, 7):
        for b in range(0, 130, 3):
            for sign, result in (("+", a + b), ("-", a - b)):
                *columns, last = column_steps(a, sign, b).split(", ")
                assert last == str(result)
                digits = "".join(step.split("=")[1][-1] for step in reversed(columns))
                carry = columns[-1].split("=")[1][:-1]
                assert int(carry + digits) == abs(result)
                for step in columns:
                    left, right = step.split("=")
                    assert evaluate(left) == int(right)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_vlaue": 3},
            r"config\.data\.options\.max_vlaue is not an option of arithmetic\. Did you mean .max_value..*min_value=2",
        ),
        ({"max_value": "30"}, r"config\.data\.options\.max_value='30' must be of type int"),
        ({"allow_negative": 1}, r"config\.data\.options\.allow_negative=1 must be of type bool"),
        ({"operations": "+*"}, r"config\.data\.options\.operations='\+\*' must be"),
        ({"max_value": 1}, r"config\.data\.options\.max_value=1 must be at least config\.data\.options\.min_value=2"),
        ({"min_value": -1}, r"config\.data\.options\.min_value=-1 must be at least 0"),
        ({"terms": 5}, r"config\.data\.options\.terms=5 must be 2, 3 or 4"),
        ({"wording": "What?"}, r"config\.data\.options\.wording='What\?' must be a text that contains \{expression\}"),
        ({"style": "long"}, r"config\.data\.options\.style='long' must be plain, steps or mixed"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        options_from(ArithmeticOptions, options, "arithmetic")


def test_reasoning_gym_splits_are_disjoint_counted_and_reproducible():
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}  # 200 questions in all: many repeat
    made = tasks.reasoning_gym("chain_sum", options, train_size=100, eval_size=30, seed=7)
    assert (len(made.train), len(made.evaluation)) == (100, 30)
    questions = [problem["prompt"] for problem in made.train + made.evaluation]
    assert len(set(questions)) == 130
    assert made.counts["duplicates"] > 0 and made.counts["unscorable"] == 0
    assert made == tasks.reasoning_gym("chain_sum", options, train_size=100, eval_size=30, seed=7)
    # Seeds that differ by one share almost all items in reasoning-gym: evaluation must not come from seed + 1.
    scorer = ReasoningGymScorer("chain_sum", options)
    golds = [f"Answer: {problem['answer']}" for problem in made.train]
    assert scorer(golds, examples=made.train) == [1.0] * 100
    assert json.loads(made.train[0]["metadata"])["source_dataset"] == "chain_sum"


def test_reasoning_gym_with_too_few_questions_gives_what_there_is_or_refuses():
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    made = tasks.reasoning_gym("chain_sum", options, train_size=1000, eval_size=30, seed=0)
    assert len(made.train) == 170
    with pytest.raises(ConfigError, match=r"only 200 different questions.*config\.data\.eval_size=120"):
        tasks.reasoning_gym("chain_sum", options, train_size=1000, eval_size=120, seed=0)
    # A small training set is no reason to refuse.
    assert len(tasks.reasoning_gym("chain_sum", options, train_size=10, eval_size=120, seed=0).evaluation) == 120


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, r"reasoning_gym:chain_sums: there is no such task\. Did you mean .chain_sum."),
        (
            "chain_sum",
            {"max_term": 3},
            r"config\.data\.options\.max_term is not an option of chain_sum\. Did you mean .*max_terms=6",
        ),
        ("chain_sum", {"seed": 3}, r"config\.data\.options\.seed is set by config\.data\.seed"),
        ("chain_sum", {"min_terms": 9}, r"min_terms=9.*max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, r"min_terms='two'.*are refused"),
        ("propositional_logic", {}, r"propositional_logic: none of its first answers gets full marks"),
        ("game_of_life_halting", {}, r"game_of_life_halting: its scorer gives nonsense full marks"),
    ],
)
def test_reasoning_gym_typos_and_unusable_tasks_are_refused(task, options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.reasoning_gym(task, options, **SIZES)


def test_items_without_a_usable_answer_are_dropped_and_counted(monkeypatch):
    """An item that cannot be judged must not become a reward of 1.0, nor of 0.0, for everything."""
    real = tasks.reasoning_gym_dataset("prime_factorization", {}, seed=0, size=100)
    answers = {0: None, 1: " ", 2: "unknown"}  # its scorer raises on the third

    class Spoiled:
        def __getitem__(self, index):
            return {**real[index], "answer": answers.get(index % 8, real[index]["answer"])}

    monkeypatch.setattr(tasks, "reasoning_gym_dataset", lambda *args, **kwargs: Spoiled())
    made = tasks.reasoning_gym("prime_factorization", {}, train_size=50, eval_size=10, seed=0)
    assert made.counts["unscorable"] >= 20
    assert not {problem["answer"] for problem in made.train + made.evaluation} & set(answers.values())
