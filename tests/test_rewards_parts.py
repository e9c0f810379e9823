"""Parts of the reward that need no answer, their weights, functions of other trainers, and functions that take too long."""

import textwrap
import time

import pytest

from cispo_jax.config import ConfigError, RewardSettings, default_config, from_config_dict
from cispo_jax.rewards import RewardError, build, exact_match, overlong_penalties, resolve
from cispo_jax.rewards.parts import FORMATS, FormatReward, RepetitionPenalty

BATCH = dict(
    responses=["a", "b", "a"],
    examples=[{"id": str(i), "prompt": f"p{i}", "answer": "a", "level": i} for i in range(3)],
    finish_reasons=["stop", "length", "stop"],
    response_tokens=[1, 2, 3],
)


@pytest.mark.parametrize(
    "kind, text, fits",
    [
        ("boxed", r"so \boxed{5}", 1),
        ("boxed", r"so \boxed{5", 0),
        ("boxed", r"so \boxed{}", 0),
        ("boxed", "so 5", 0),
        ("boxed", r"<think>\boxed{5}", 0),
        ("boxed", r"<think>\boxed{5}</think> 5", 0),
        ("boxed", r"<think>hm</think> \boxed{5}", 1),
        ("boxed", r"\boxed{4} or \boxed{5", 0),
        ("answer_line", "x\nAnswer: 5", 1),
        ("answer_line", "Answer:", 0),
        ("answer_tag", "x <answer>5</answer>\n", 1),
        ("answer_tag", "<answer>5</answer> and so on", 0),
        ("answer_tag", "<answer>4</answer><answer>5</answer>", 0),
        ("answer_tag", "<answer></answer>", 0),
        ("think", "<think>hm</think>5", 1),
        ("think", "hm</think>5", 1),
        ("think", "<think>hm</think>", 0),
        ("think", "<think></think>5", 0),
        ("think", "<think>hm 5", 0),
        ("think", "5", 0),
        ("think", "<think>a</think>5<think>", 0),
    ],
)
def test_formats(kind, text, fits):
    assert FormatReward(kind)([text]) == [fits]


def test_repetition():
    same, once, loop = "a b c a b c", "a b c d e f", "x " * 100
    assert RepetitionPenalty(3)([same, once, "a b", ""]) == [3 / 4 - 1, 0.0, 0.0, 0.0]
    assert RepetitionPenalty(3)([loop])[0] == pytest.approx(1 / 98 - 1)


def test_the_total_is_weighted_and_the_parts_are_not():
    settings = RewardSettings(format="boxed", repetition_ngram=2, weights={"format": 0.5, "task": 2.0})
    with build(settings, exact_match, max_new_tokens=8) as score:
        texts = [r"\boxed{a}", "a a a a", "b"]
        total, parts = score(texts, BATCH["examples"], BATCH["finish_reasons"], [1, 2, 3])
    assert parts == {"task": [1, 0, 0], "format": [1, 0, 0], "repetition": [0, 1 / 3 - 1, 0]}
    assert total == pytest.approx([2.5, 1 / 3 - 1, 0])


def test_the_overlong_penalty_of_dapo():
    lengths = [10_000, 16_384, 18_432, 20_480, 20_481]
    assert overlong_penalties(lengths, 20_480, 4_096) == [0, 0, -0.5, -1, -1]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"format": "box"}, "format='box' is not one of boxed, answer_line"),
        ({"repetition_ngram": -1}, "repetition_ngram=-1 must be 0"),
        ({"weights": {"fromat": 1.0}}, r"weights.fromat=1.0: a finite number for one of the parts task"),
        ({"weights": {"task": "high"}}, r"weights.task='high'"),
        ({"weights": {"task": float("nan")}}, r"weights.task=nan"),
        ({"timeout": 3.0}, r"timeout=3.0 .*needs config.rewards.workers"),
        ({"timeout": -1.0, "workers": 1}, r"timeout=-1.0"),
        ({"functions": {"format": "a:b"}}, "format=a:b: task, overlong, format, repetition name built-in parts"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(RewardSettings(**settings), exact_match, max_new_tokens=8)


def test_weights_come_from_a_page_and_from_flags():
    config = default_config()
    config.rewards.weights.task = 2.0
    assert from_config_dict(config).rewards.weights == {"task": 2.0}


OTHERS = """
    import time

    def trl(completions, prompts, answer, level, **kwargs):
        assert prompts == ["p0", "p1", "p2"][: len(prompts)] or len(prompts) < 3, prompts
        assert "finish_reasons" in kwargs and kwargs["id"]
        return [float(c == a) + n / 10 for c, a, n in zip(completions, answer, level)]

    def trl_plain(completions):
        return [None if c == "b" else 1.0 for c in completions]

    def trl_chat(prompts, completions, **kwargs):
        assert all(p[-1]["role"] == "user" for p in prompts)
        return [float(c[0]["content"] == "a" and c[0]["role"] == "assistant") for c in completions]

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "" and extra_info["prompt"].startswith("p")
        return {"score": 1.0 if solution_str == ground_truth else -1.0, "acc": True}

    def verl_plain(solution_str, ground_truth):
        return solution_str == ground_truth

    def slow(responses, *, examples, **_):
        if examples[0]["id"] == "1":
            time.sleep(60)
        return [1.0] * len(responses)

    def broken(responses, *, examples, **_):
        return [1 / 0 if e["id"] == "1" else 1.0 for e in examples]
"""


@pytest.fixture
def others(tmp_path):
    file = tmp_path / "others.py"
    file.write_text(textwrap.dedent(OTHERS))
    return file


@pytest.mark.parametrize(
    "spec, values",
    [
        ("trl:{}:trl", [1.0, 0.1, 1.2]),
        ("trl:{}:trl_plain", [1.0, None, 1.0]),
        ("trl_chat:{}:trl_chat", [1.0, 0.0, 1.0]),
        ("verl:{}:verl", [1.0, -1.0, 1.0]),
        ("verl:{}:verl_plain", [1.0, 0.0, 1.0]),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_functions_of_other_trainers_run_unchanged(spec, values, workers, others):
    settings = RewardSettings(functions={"theirs": spec.format(others)}, workers=workers)
    with build(settings, None, max_new_tokens=8) as score:
        score.check(BATCH["examples"][0])
        assert score(*BATCH.values())[0] == pytest.approx(values)


def test_a_missing_function_of_another_trainer_is_named(others):
    with pytest.raises(ConfigError, match=r"rewards.x=.*others.py has no trll"):
        resolve(f"trl:{others}:trll", "config.rewards.x")


def test_a_function_that_takes_too_long_leaves_its_group_unscored(others, caplog):
    settings = RewardSettings(functions={"slow": f"{others}:slow"}, workers=2, timeout=3.0)
    with build(settings, None, max_new_tokens=8) as score:
        start = time.monotonic()
        assert score(*BATCH.values())[0] == [1.0, None, 1.0]
        assert time.monotonic() - start < 40
        assert score.failed == {"slow": 1}
        assert "no answer after config.rewards.timeout=3 seconds on example '1'" in caplog.text
        assert score(["a"], [{"id": "7", "answer": "a", "prompt": ""}], ["stop"], [1])[0] == [1.0]  # by the new process


def test_a_failing_function_names_itself_and_the_example(others, caplog):
    with build(RewardSettings(functions={"bad": f"{others}:broken"}), None, max_new_tokens=8) as score:
        assert score(*BATCH.values())[0] == [1.0, None, 1.0]
    assert all(word in caplog.text for word in ("config.rewards.bad", "broken", "ZeroDivisionError", "example '1'"))
    score = build(RewardSettings(functions={"bad": f"{others}:broken"}), None, max_new_tokens=8)
    with pytest.raises(RewardError, match="No response could be scored"):
        score(["a"], [{"id": "1", "answer": "a"}], ["stop"], [1])


def test_every_format_is_a_setting():
    for kind in FORMATS:
        build(RewardSettings(format=kind), exact_match, max_new_tokens=8).close()
