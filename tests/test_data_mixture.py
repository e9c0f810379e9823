"""Mixtures: shares, levels and retirement are functions of a small state; each task is judged by its own scorer."""

import collections
import json

import pytest

from cispo_jax.config import ConfigError, DataSettings
from cispo_jax.data import PromptStream, load
from cispo_jax.data.stream import Schedule
from cispo_jax.rewards import MixedScorer, answer_of, verdict_of
from cispo_jax.rewards.workers import Workers, name_of


def examples(**levels):
    """`levels`: task -> how many examples each level has."""
    return [
        {"id": f"{task}/{level}/{i}", "task": task, "level": level}
        for task, sizes in levels.items()
        for level, size in enumerate(sizes)
        for i in range(size)
    ]


def test_shares_hold_at_every_point_of_the_order_and_an_epoch_of_a_task_has_each_example_once():
    stream = PromptStream(examples(a=[6], b=[3]), 0, {"a": Schedule(weight=3.0), "b": Schedule(weight=1.0)})
    state = {"position": 0}
    taken, positions = stream.take(state, 400)
    assert positions == list(range(400)) and state["position"] == 400
    for end in range(4, 401, 4):
        assert abs(sum(e["task"] == "a" for e in taken[:end]) - 3 * end / 4) <= 1
    of_a = [e["id"] for e in taken if e["task"] == "a"]
    assert all(len(set(of_a[i : i + 6])) == 6 for i in range(0, 300, 6))
    assert of_a[:6] != of_a[6:12]
    again = PromptStream(examples(a=[6], b=[3]), 0, {"a": Schedule(weight=3.0), "b": Schedule(weight=1.0)})
    assert [again[i] for i in range(400)] == taken
    assert again.take({"position": 123}, 5)[0] == taken[123:128]


def test_a_task_gets_harder_where_its_responses_pass():
    schedules = {"a": Schedule(levels=3, advance_at=0.75, window=8), "b": Schedule()}
    stream = PromptStream(examples(a=[20, 20, 20], b=[20]), 0, schedules)
    state = {"position": 0}
    seen = []
    for step, rate in enumerate([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]):
        taken, _ = stream.take(state, 8)
        seen.append({e["level"] for e in taken if e["task"] == "a"})
        stream.observe(state, taken, [rate if e["task"] == "a" else 0.0 for e in taken])
        state = json.loads(json.dumps(state))  # as a checkpoint keeps it
        assert stream.metrics(state) == {"data/level/a": state.get("levels", {}).get("a", 0)}
        assert step < 7
    # 4 prompts of `a` a step: the window of the first two steps has passed 0.75; two steps of the second level have too.
    assert seen == [{0}, {0}, {1}, {1}, {2}, {2}, {2}]


def test_a_window_that_has_not_passed_begins_anew():
    stream = PromptStream(examples(a=[4, 4]), 0, {"a": Schedule(levels=2, advance_at=0.5, window=2)})
    state = {"position": 0}
    a = {"id": "x", "task": "a", "level": 0}
    for rates, level in (([0.0, 0.4], 0), ([0.6, None], 0), ([0.6, None], 1), ([1.0, 1.0], 1)):
        stream.observe(state, [a, a], rates)
        assert state.get("levels", {}).get("a", 0) == level


def test_prompts_that_pass_do_not_come_again():
    stream = PromptStream([{"id": str(i)} for i in range(5)], 0, retire_at=0.9)
    state = {"position": 0}
    for _ in range(10):
        taken, positions = stream.take(state, 4)
        assert len(set(positions)) == 4
        stream.observe(state, taken, [1.0 if e["id"] in "012" else 0.5 for e in taken])
        state = json.loads(json.dumps(state))
    assert sorted(state["retired"]) == ["0", "1", "2"] and stream.metrics(state) == {"data/retired": 3}
    assert {e["id"] for e in stream.take(state, 20)[0]} == {"3", "4"}
    stream.observe(state, [{"id": "3"}, {"id": "4"}], [1.0, 1.0])
    assert "3" not in state["retired"]  # over all times it came: 0.5 often, 1.0 once
    state["retired"] = [str(i) for i in range(5)]
    with pytest.raises(ConfigError, match=r"retire_at=0.9: 5 of 5 prompts are retired"):
        stream.take(state, 1)


def settings(tmp_path, tasks, **others):
    return DataSettings(source="mixture", tasks=tasks, train_size=24, eval_size=6, directory=str(tmp_path), **others)


SUMS = {"source": "arithmetic", "options": {"max_value": 30}}


def test_tasks_keep_their_settings_and_their_scorers(tmp_path):
    rows = [{"prompt": f"half of {2 * i}?", "answer": str(i)} for i in range(20)]
    file = tmp_path / "halves.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load(
        settings(
            tmp_path,
            {
                "sums": SUMS | {"prompt_suffix": "Box it.", "train_size": 10},
                "gcd": {"source": "reasoning_gym:gcd", "weight": 2, "levels": [{"max_value": 9}, {"max_value": 99}]},
                "halves": {"source": str(file)},
            },
        )
    )
    counts = collections.Counter((e["task"], e["level"]) for e in problems.train)
    assert counts == {("sums", 0): 10, ("gcd", 0): 12, ("gcd", 1): 12, ("halves", 0): 16}
    assert problems.schedules == {
        "sums": Schedule(), "gcd": Schedule(weight=2.0, levels=2), "halves": Schedule(),
    }  # fmt: skip
    assert all(("prompt_suffix" in e) == (e["task"] == "sums") for e in problems.train)
    everything = [*problems.train, *problems.evaluation]
    assert len({e["id"] for e in everything}) == len(everything) and len({e["prompt"] for e in everything}) == len(
        everything
    )
    assert {e["task"] for e in problems.evaluation[:4]} == {"sums", "gcd", "halves"}
    own = [e["answer"] for e in problems.train]
    assert problems.scorer(own, examples=list(problems.train), finish_reasons=["stop"] * len(own)) == [1.0] * len(own)
    assert {problems.verdict(e["answer"], e) for e in problems.train} == {"right"}
    assert answer_of(problems.scorer)("<answer>7</answer>", problems.train[0]) == "7"
    with Workers_of(problems.scorer) as score:
        assert score(own[:8], problems.train[:8]) == [1.0] * 8


def test_what_a_level_holds_out_no_other_trains_on(tmp_path):
    """Two levels whose ranges overlap, with every problem of the smaller one in the larger."""
    small, large = {"min_value": 2, "max_value": 6}, {"min_value": 2, "max_value": 9}
    task = {"source": "reasoning_gym:gcd", "options": {"min_numbers": 2, "max_numbers": 2}, "levels": [small, large]}
    problems = load(settings(tmp_path, {"gcd": task | {"train_size": 60, "eval_size": 12}}))
    held_out = [example["prompt"] for example in problems.evaluation]
    assert len(set(held_out)) == len(held_out) > 6
    assert not {example["prompt"] for example in problems.train} & set(held_out)
    assert "dropped because another level or task holds them out" in problems.description


class Workers_of:
    """A scorer in a process that knows it by its name and fields only."""

    def __init__(self, scorer):
        self.scorer, self.workers = scorer, Workers(1)

    def __enter__(self):
        from cispo_jax.rewards.apply import Rows

        rows = lambda texts, examples: Rows(texts, list(examples), ["stop"] * len(texts), [1] * len(texts))
        return lambda texts, examples: self.workers.run(self.scorer, "mixed", [rows(texts, examples)])[0].values

    def __exit__(self, *_):
        self.workers.close()


def test_a_mixed_scorer_gives_each_scorer_its_own_rows():
    scorer = MixedScorer({name: name_of(function) for name, function in {"exact": exact, "length": length}.items()})
    rows = [{"scorer": name, "answer": "a"} for name in ("length", "exact", "length", "exact")]
    texts = ["a", "a", "bbb", "b"]
    assert scorer(texts, examples=rows, response_tokens=[1, 2, 3, 4]) == [1.0, 1.0, 3.0, 0.0]
    assert verdict_of(scorer)("a", rows[1]) == "right"


def exact(responses, *, examples, **_):
    return [float(r == e["answer"]) for r, e in zip(responses, examples, strict=True)]


def length(responses, *, examples, response_tokens):
    assert len(response_tokens) == len(examples)
    return [float(n) for n in response_tokens]


@pytest.mark.parametrize(
    "tasks, message",
    [
        ({}, "needs source=mixture and a task at least"),
        ({"a": 3}, r"config.data.tasks.a=3 must be a table with a source"),
        ({"a": {"weight": 1}}, "must be a table with a source"),
        ({"a": SUMS | {"wieght": 1}}, r"tasks.a.wieght is not a setting of a task. Did you mean \"weight\"\?"),
        ({"a": SUMS | {"weight": 0}}, "tasks.a.weight=0 must be a number > 0"),
        ({"a": SUMS | {"advance_at": 1.5}}, r"tasks.a.advance_at=1.5 must be a share in \(0, 1\]"),
        ({"a": SUMS | {"levels": []}}, r"tasks.a.levels=\[\] must be a list of tables"),
        ({"a": SUMS | {"train_size": 0}}, "tasks.a.train_size=0 must be an integer > 0"),
        ({"a": SUMS | {"prompt_suffix": 3}}, "config.data.tasks.a.prompt_suffix=3: must be of type str, not int"),
        ({"a": SUMS | {"options": [1]}}, r"config.data.tasks.a.options=\[1\] must be a table"),
        ({"a": {"source": "mixture"}}, "a task of a mixture is no mixture"),
        ({"a": {"source": "reasoning_gym:nonsense"}}, "config.data.tasks.a: .*there is no such task"),
        ({"a": SUMS | {"options": {"max_valeu": 3}}}, "config.data.tasks.a: .*max_valeu is not an option"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_said(tmp_path, tasks, message):
    with pytest.raises(ConfigError, match=message):
        load(settings(tmp_path, tasks))


def test_tasks_without_a_mixture_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="a mixture needs source=mixture"):
        load(DataSettings(tasks={"a": SUMS}))
