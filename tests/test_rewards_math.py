"""The verifier of mathematics: every reported pair, no answer that harms another, the same in every thread and process."""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import time

import math_pairs
import pytest

from cispo_jax.rewards import answer_line_reward, math_reward, verify_math
from cispo_jax.rewards.math import extract, grammar, judge, symbolic, verdicts, verify_answer_line
from cispo_jax.rewards.math.normal import normalise

TOO_MUCH = [
    r"2003^{2002^{2001}}",
    r"(10^9)!",
    r"10^{10^{10}}",
    r"\sum_{n=1}^{10^{8}} \sin(n)",
    r"(x+y+z+w)^{300}",
    r"\int_0^1 e^{x^{x^x}} dx",
    r"\prod_{n=1}^{10^7} (n+x)",
    r"((9!)!)!",
    r"\binom{10^{12}}{5 \cdot 10^{11}}",
    r"\lfloor e^{10^{7}} \rfloor",
    r"\int \int e^{\sin(x^x)} dx dx",
    "9^{9^{9^9}} - 9^{9^{9^9}}",
    "9" * 5000,
    "(" * 500 + "9" + ")" * 500,
    r"\sqrt{" * 60 + "2" + "}" * 60,
    "+1" * 1900,
]


@pytest.mark.parametrize("gold, answer, right", math_pairs.REPORTED + math_pairs.FURTHER)
def test_pairs(gold, answer, right):
    assert verify_math(rf"\boxed{{{answer}}}", rf"\boxed{{{gold}}}") is right
    assert verify_math(rf"So the answer is \boxed{{{answer}}}.", gold) is right


@pytest.mark.parametrize("gold, response, right", math_pairs.RESPONSES)
def test_responses(gold, response, right):
    assert verify_math(response, gold) is right


@pytest.mark.parametrize("gold, answer, right", math_pairs.REPORTED + math_pairs.FURTHER)
def test_a_right_pair_is_right_the_other_way_round_unless_the_table_says_otherwise(gold, answer, right):
    one_way = {
        "2+4=6",
        r"\boxed{}",
        "0 < x < 12.5",
        "(0,12.5)",
        r"(5,\infty)",
        "x<3",
        r"(-\infty,3)",
        "(-1,2)",
        "[-1,2)",
    }
    if right is not None and not {gold, answer} & one_way and answer.strip():
        assert verify_math(rf"\boxed{{{gold}}}", answer) is right


def test_a_mark_far_from_the_end_is_found():
    assert verify_math("#### 42 " + "and so the prose goes on for 7 lines. " * 25, "42") is True
    assert verify_math("#### 42\n" + "and so the prose goes on for 7 lines. " * 25, "42") is True


@pytest.mark.parametrize("answer", TOO_MUCH, ids=lambda answer: answer[:20])
def test_an_answer_that_costs_too_much_is_wrong_and_the_next_one_is_judged(answer):
    start = time.monotonic()
    assert verify_math(rf"\boxed{{{answer}}}", "9") is False
    assert time.monotonic() - start < 30  # not a benchmark: only that it ends
    assert verify_math(r"\boxed{\frac{\sqrt{4}}{6}}", r"\frac{1}{3}") is True


def test_a_gold_that_costs_too_much_is_not_judged_unless_the_text_is_the_same():
    gold = r"2003^{2002^{2001}}"
    assert verify_math(r"\boxed{9}", gold) is None
    assert verify_math(r"\boxed{2003^{2002^{2001}}}", gold) is True


def test_golds_that_cannot_be_judged():
    prose = "If the original speed was maintained the train would arrive"
    for gold in (prose, "", "  ", r"x \equiv", "+", r"\frac{1}{"):
        assert verify_math(r"\boxed{5}", gold) is None
    assert verify_math(f"\\boxed{{{prose}}}", prose) is True
    assert math_reward([r"\boxed{5}", r"\boxed{5}", "no"], examples=[{"answer": a} for a in (prose, "5", "5")]) == [
        None,
        1.0,
        0.0,
    ]


def test_the_same_in_threads():
    pairs = [(rf"\boxed{{{a}}}", g) for g, a, _ in math_pairs.REPORTED] + [
        (rf"\boxed{{{TOO_MUCH[i]}}}", "9") for i in range(4)
    ]
    alone = [verify_math(*pair) for pair in pairs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda pair: verify_math(*pair), pairs)) == alone


SCRIPT = """
import json, multiprocessing, sys
from cispo_jax.rewards.math import verify_math

def judged(pair):
    return verify_math(*pair)

if __name__ == "__main__":
    pairs = json.loads(sys.argv[2])
    here = [judged(pair) for pair in pairs[:6]]  # this process has a judge of its own by then
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(json.dumps(pool.map(judged, pairs)))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_same_in_processes(method, tmp_path):
    pairs = [(rf"\boxed{{{a}}}", g) for g, a, _ in math_pairs.REPORTED]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, method, json.dumps(pairs)], capture_output=True, text=True)
    assert json.loads(done.stdout or "null") == [right for *_, right in math_pairs.REPORTED], done.stderr


def test_an_error_inside_is_counted_and_logged_and_not_a_wrong_answer(monkeypatch, caplog):
    def fail(*_):
        raise judge.JudgeError("made up")

    monkeypatch.setattr(judge._pool, "ask", fail)
    before = judge.counts[judge.ERROR]
    monkeypatch.setitem(judge.counts, judge.ERROR, 0)
    assert verify_math(r"\boxed{\sqrt{5}+1}", r"7\sqrt{3}x") is None
    assert judge.counts[judge.ERROR] == 1
    assert "made up" in caplog.text
    monkeypatch.setitem(judge.counts, judge.ERROR, before)


def test_a_judge_that_was_killed_is_replaced():
    one = judge.Judge()
    assert one.ask("values_equal", ["1", "1", None], 1.0) is True
    one._process.kill()
    one._process.wait()
    with pytest.raises(judge.JudgeError):  # its child may still work, but nobody answers for it when it is stopped
        for _ in range(2):
            one.ask("read", [r"\sum_{n=1}^{10^{8}} \sin(n)"], 0.1)
    assert not one.alive
    assert judge._Pool().ask("read", ["1"], 1.0) is True


def test_text_is_never_run():
    canary = "__import__('pathlib').Path('canary').write_text('')"
    for text in (rf"\boxed{{{canary}}}", canary, f"Answer: {canary}"):
        assert verify_math(text, "5") is False
        verify_math("5", text)
    assert not pathlib.Path("canary").exists()


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "\\boxed{1} x ", "answer: ", "<answer>", "$ ", "\\( ", "$$a", "(", "{", "1,111", "9 ", "-", "\\frac",
     "\\text{a} ", "^{", "\\pm ", "<think>", "####", "\n", "= ", "\\left(", "sqrt(", "(1,"],
)  # fmt: skip
def test_long_nonsense_ends(piece):
    text = piece * (300_000 // len(piece))
    for response in (text, rf"\boxed{{{text}}}", f"Answer: {text}"):
        assert not verify_math(response, "5")
        assert not verify_answer_line(response, "5")


def test_only_text_is_judged():
    for arguments, name in (((5, "5"), "response"), (("5", 5), "gold"), ((None, "5"), "response")):
        with pytest.raises(TypeError, match=name):
            verify_math(*arguments)


@pytest.mark.parametrize(
    "response, gold, right",
    [
        ("Answer: 42", "42", True),
        ("so it is\n\nAnswer: $42$", "42", True),
        ("**Answer:** \\boxed{42}", "42", True),
        ("answer : 42.", "42", True),
        ("Answer: 41\nAnswer: 42", "42", True),
        ("Answer: 42\nAnswer: 41", "42", False),
        ("\\boxed{42}", "42", False),
        ("The answer is 42", "42", False),
        ("Answer:", "42", False),
        ("Answer: 42 or 43", "42", False),
        ("<think>Answer: 42", "42", False),
        ("Answer: \\frac{1}{2}", "0.5", True),
    ],
)
def test_the_answer_line(response, gold, right):
    assert verify_answer_line(response, gold) is right
    assert answer_line_reward([response], examples=[{"answer": gold}]) == [float(right)]


def test_verdicts():
    example = {"answer": "5"}
    texts = (r"\boxed{5}", r"\boxed{6}", "", "Answer: 5")
    of = lambda reward: [verdicts(reward)(text, example) for text in texts]
    assert of(math_reward) == ["right", "wrong answer", "no answer", "right"]
    assert of(answer_line_reward) == ["no answer", "no answer", "no answer", "right"]
    assert verdicts(math_reward)("5", {"answer": ""}) == "not judged"


@pytest.mark.parametrize(
    "text, found",
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{3}, \boxed{5} and \boxed{7}", "3, 5, 7"),
        (r"\boxed{3}, so \boxed{5}", "5"),
        (r"\boxed{3", None),
        ("<think>5", None),
        ("5</think>6", "6"),
    ],
)
def test_where_the_answer_is(text, found):
    assert extract.final_answer(text) == found


@pytest.mark.parametrize(
    "text, same",
    [
        (r"\dfrac 12", r"\frac{1}{2}"),
        (r"\frac1x", r"\frac{1}{x}"),
        (r"\left( 1,\,2 \right)", "( 1, 2 )"),
        ("sqrt(2)", r"\sqrt{2}"),
        ("sqrt(1+(2))", r"\sqrt{1+(2)}"),
        ("sqrt(2", "sqrt(2"),
        ("x^(a+b)", "x^{a+b}"),
        ("2^10", "2^{10}"),
        ("\u22125", "-5"),
        (r"1{,}234", "1234"),
        ("5!", "5!"),
    ],
)
def test_normal_form(text, same):
    assert normalise(text) == same


def test_structures_have_bounds():
    with pytest.raises(grammar.TooComplex):
        grammar.parse(",".join("x" * 100))
    with pytest.raises(grammar.TooComplex):
        grammar.parse("=".join("x" * 100))
    with pytest.raises(grammar.TooComplex):
        grammar.parse(r"\pm 1 \pm 2 \pm 3 \pm 4")


@pytest.mark.parametrize(
    "latex", [r"2003^{2002^{2001}}", "(10^9)!", r"\frac{1}{(10^8)!}", r"e^{10^{9}}", "10^{10^{6}}"]
)
def test_numbers_are_bounded_before_they_are_computed(latex):
    with pytest.raises(symbolic.Unreadable, match="too large"):
        symbolic.read(latex)


@pytest.mark.parametrize("latex", ["2004!", r"2^{2^{10}}", r"\frac{1}{2004!}", "10^{1000}"])
def test_large_numbers_are_exact(latex):
    assert symbolic.values_equal(latex, latex)
    assert not symbolic.values_equal(latex, rf"{latex} \cdot \frac{{2005}}{{2004}}")
