"""The rewards of a run: sums, unscored responses, failing functions, the overlong penalty, worker processes."""

import logging
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from cispo_jax.config import ConfigError, RewardSettings
from cispo_jax.data import tasks
from cispo_jax.rewards import ReasoningGymScorer, RewardError, Scorer, build, exact_match, overlong_penalties

EXAMPLES = [{"id": "a", "answer": "1"}] * 2 + [{"id": "b", "answer": "2"}] * 2 + [{"id": "c", "answer": "3"}] * 2
RESPONSES = ["1", "0", "2", "2", "3", "x"]
BATCH = (RESPONSES, EXAMPLES, ["stop"] * 5 + ["length"], [1, 2, 3, 4, 5, 6])


def write(tmp_path, source, name="rewards.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(source))
    return path


def test_the_task_alone():
    with build(RewardSettings(), exact_match, max_new_tokens=8) as scorer:
        total, parts = scorer(*BATCH)
    assert total == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    assert parts == {"task": total} and scorer.failed == {}


def test_parts_add_up(tmp_path):
    path = write(
        tmp_path, "def f(responses, *, finish_reasons, response_tokens, **_): return [n / 10 for n in response_tokens]"
    )
    settings = RewardSettings(functions={"length": f"{path}:f"}, task="on", overlong_buffer=4, overlong_penalty=2.0)
    total, parts = build(settings, exact_match, max_new_tokens=6)(*BATCH)
    assert list(parts) == ["task", "length", "overlong"]
    assert parts["length"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert parts["overlong"] == [0.0, 0.0, -0.5, -1.0, -1.5, -2.0]
    np.testing.assert_allclose(total, [1.1, 0.2, 0.8, 0.4, 0.0, -1.4], atol=1e-12)
    # auto: a named function replaces the task's own scorer.
    assert list(build(RewardSettings(functions={"length": f"{path}:f"}), exact_match, max_new_tokens=6)(*BATCH)[1]) == [
        "length"
    ]


def test_functions_get_what_they_are_promised():
    seen = {}

    def spy(responses, *, examples, finish_reasons, response_tokens):
        seen.update(
            responses=responses, examples=examples, finish_reasons=finish_reasons, response_tokens=response_tokens
        )
        return [0.0] * len(responses)

    Scorer({"spy": spy})(RESPONSES, EXAMPLES, BATCH[2], np.asarray(BATCH[3], np.int32))
    assert seen == dict(zip(("responses", "examples", "finish_reasons", "response_tokens"), BATCH, strict=True))
    assert all(type(n) is int for n in seen["response_tokens"])
    assert Scorer({"spy": spy})([], [], [], []) == ([], {"spy": []})


def test_none_and_nan_are_unscored_whatever_the_other_parts_say():
    """Rewards [None, -1, -1, None]: unscored, never 0."""
    parts = {"a": lambda r, **_: [None, -1, -1.0, math.nan, np.float32(2), True], "b": lambda r, **_: np.ones(6)}
    total, values = Scorer(parts)(*BATCH)
    assert total == [None, 0.0, 0.0, None, 3.0, 2.0]
    assert values == {"a": [None, -1.0, -1.0, None, 2.0, 1.0], "b": [1.0] * 6}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"config\.rewards\.bad \(<lambda>\) returned 1 values for 6 responses"),
        (None, r"returned None"),
        (1.0, r"returned 1\.0 \(float\); a reward returns a list"),
        ("111111", r"returned '111111' \(str\)"),
        ([1, 2, 3, 4, 5, "6"], r"returned '6' \(str\) for a response to example 'c'"),
        ([1, 2, 3, 4, 5, math.inf], r"returned inf .*example 'c'; a reward is a finite number"),
        ([[1]] * 6, r"returned \[1\] \(list\)"),
    ],
)
def test_what_is_no_list_of_numbers_is_an_error(returned, message):
    with pytest.raises(RewardError, match=message):
        Scorer({"bad": lambda responses, **_: returned})(*BATCH)


def test_a_failing_example_costs_its_group_and_is_named(caplog):
    def fragile(responses, *, examples, **_):
        return [1.0 / (example["id"] != "b") for example in examples]

    scorer = Scorer({"task": exact_match, "fragile": fragile})
    with caplog.at_level(logging.WARNING):
        total, parts = scorer(*BATCH)
    assert parts["fragile"] == [1.0, 1.0, None, None, 1.0, 1.0]
    assert total == [2.0, 1.0, None, None, 2.0, 1.0]
    assert scorer.failed == {"fragile": 2}
    assert (
        "2 of 6 responses left unscored: Reward config.rewards.fragile (fragile) raised ZeroDivisionError"
        in caplog.text
    )
    assert "example 'b'" in caplog.text and "test_rewards_scorer.py:" in caplog.text
    # Once it has worked, a batch on which all fails is counted, too, not fatal ...
    assert scorer(RESPONSES[2:4], EXAMPLES[2:4], ["stop"] * 2, [1, 1])[0] == [None, None]
    assert scorer.failed == {"fragile": 2}
    # ... but a function that never worked is broken.
    with pytest.raises(RewardError, match=r"No response could be scored: .*example 'b'"):
        Scorer({"fragile": fragile})(RESPONSES[2:4], EXAMPLES[2:4], ["stop"] * 2, [1, 1])


def test_a_typo_in_a_field_gets_the_list_of_fields():
    scorer = Scorer(
        {
            "mine": lambda responses, *, examples, **_: [
                float(r == e["answr"]) for r, e in zip(responses, examples, strict=True)
            ]
        }
    )
    with pytest.raises(RewardError, match=r"no field 'answr'\. Did you mean .answer.\? It has: id, answer") as caught:
        scorer.check(EXAMPLES[0])
    assert "trial call before training" in str(caught.value) and "\n" not in str(caught.value)
    Scorer({"fine": exact_match}).check(EXAMPLES[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "yes"}, r"config\.rewards\.task='yes' is not one of auto, on, off"),
        ({"task": "off"}, r"config\.rewards\.task=off and no function named"),
        ({"functions": {"overlong": "cispo_jax.rewards:exact_match"}}, r"config\.rewards\.overlong=.*built-in"),
        (
            {"functions": {"x": "cispo_jax.rewards:nothing"}},
            r"config\.rewards\.x=cispo_jax\.rewards:nothing: .*has no nothing",
        ),
        ({"workers": -1}, r"config\.rewards\.workers=-1"),
        ({"overlong_buffer": 9}, r"config\.rewards\.overlong_buffer=9 .*config\.sampling\.max_new_tokens=8"),
        ({"overlong_buffer": -1}, r"config\.rewards\.overlong_buffer=-1"),
        ({"overlong_penalty": -1.0}, r"config\.rewards\.overlong_penalty=-1\.0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(RewardSettings(**settings), exact_match, max_new_tokens=8)
    with pytest.raises(ConfigError, match="no scorer of its own"):
        build(RewardSettings(), None, max_new_tokens=8)


def test_overlong_penalty_of_dapo():
    lengths = [10_000, 16_384, 18_432, 20_480, 20_481]
    assert overlong_penalties(lengths, limit=20_480, buffer=4_096) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalties([0, 1, 4], limit=4, buffer=4, penalty=0.5) == [0.0, -0.125, -0.5]


# -------------------------------------------------------------------------------------------------------------- workers

WORKER_REWARDS = """
    import os, sys
    CALLS = []
    def loaded(responses, **_): return [float("jax" in sys.modules)] * len(responses)
    def number(responses, **_):
        print("a reward may print")
        return [float(r) if r != "x" else None for r in responses]
    def process(responses, *, examples, **_): return [float(os.getpid())] * len(responses)
    def fragile(responses, *, examples, **_): return [1.0 / (e["id"] != "b") for e in examples]
    def deadly(responses, *, examples, **_):
        if examples[0]["id"] == "b": os._exit(3)
        return [1.0] * len(responses)
    def wrong(responses, **_): return [1.0]
"""


def test_workers_agree_with_inline_scoring_and_keep_the_order(tmp_path):
    path = write(tmp_path, WORKER_REWARDS)
    functions = {name: f"{path}:{name}" for name in ("number", "fragile")}
    rows = [list(column) * 9 for column in BATCH]
    rows[1] = [{**example, "id": f"{example['id']}{i // 6}"} for i, example in enumerate(rows[1])]
    inline = build(RewardSettings(functions=functions, task="on"), exact_match, max_new_tokens=8)
    with build(RewardSettings(functions=functions, task="on", workers=2), exact_match, max_new_tokens=8) as scorer:
        assert scorer(*rows) == inline(*rows)
        assert scorer(*BATCH) == inline(*BATCH)
        assert scorer.failed == inline.failed == {"fragile": 2}
        assert scorer([], [], [], []) == ([], {"task": [], "number": [], "fragile": []})


def test_workers_are_other_processes_without_jax_even_under_a_script_that_has_it(tmp_path):
    """The parent's `__main__` imports jax, without a guard: multiprocessing would run it in each child."""
    path = write(tmp_path, WORKER_REWARDS)
    script = write(
        tmp_path,
        f"""
        import os, sys
        import jax
        from cispo_jax.config import RewardSettings
        from cispo_jax.rewards import build
        functions = {{"loaded": "{path}:loaded", "process": "{path}:process"}}
        with build(RewardSettings(functions=functions, workers=2), None, max_new_tokens=4) as scorer:
            examples = [{{"id": "a", "answer": "1"}}] * 2 + [{{"id": "b", "answer": "1"}}] * 2
            _, parts = scorer(["1"] * 4, examples, ["stop"] * 4, [1] * 4)
        assert parts["loaded"] == [0.0] * 4, parts
        assert os.getpid() not in parts["process"], parts
        print("started once")
        """,
        "script.py",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=import_path())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "started once\n"


def test_a_group_is_never_split_over_workers(tmp_path):
    path = write(tmp_path, WORKER_REWARDS)
    with build(RewardSettings(functions={"p": f"{path}:process"}, workers=2), None, max_new_tokens=8) as scorer:
        pids = scorer(*BATCH)[0]
    assert all(pids[i] == pids[i + 1] for i in (0, 2, 4)) and len(set(pids)) == 2


def test_a_worker_that_dies_costs_its_rows_and_is_replaced(tmp_path):
    path = write(tmp_path, WORKER_REWARDS)
    with build(RewardSettings(functions={"d": f"{path}:deadly"}, workers=2), None, max_new_tokens=8) as scorer:
        assert scorer(RESPONSES[:4], EXAMPLES[:4], ["stop"] * 4, [1] * 4)[0] == [1.0, 1.0, None, None]
        assert scorer.failed == {"d": 2}
        assert scorer(RESPONSES[:2], EXAMPLES[:2], ["stop"] * 2, [1] * 2)[0] == [1.0, 1.0]
        assert scorer(RESPONSES[4:], EXAMPLES[4:], ["stop"] * 2, [1] * 2)[0] == [1.0, 1.0]
        assert scorer.failed == {}


def test_errors_of_workers_reach_the_user(tmp_path):
    path = write(tmp_path, WORKER_REWARDS)
    settings = RewardSettings(functions={"w": f"{path}:wrong"}, workers=1)
    message = r"config\.rewards\.w \(.*:wrong\) returned 1 values for 6 responses"
    with build(settings, None, max_new_tokens=8) as scorer, pytest.raises(RewardError, match=message):
        scorer(*BATCH)
    with pytest.raises(
        ConfigError, match=r"config\.rewards\.workers > 0 needs functions that another process can import"
    ):
        Scorer({"local": lambda responses, **_: []}, workers=1)


def test_task_scorers_run_in_workers():
    made = tasks.reasoning_gym("chain_sum", {"max_terms": 3}, train_size=4, eval_size=2, seed=0)
    responses = [f"Answer: {example['answer']}" for example in made.train]
    task = ReasoningGymScorer("chain_sum", {"max_terms": 3})
    with build(RewardSettings(workers=1), task, max_new_tokens=8) as scorer:
        assert scorer(responses, made.train, ["stop"] * 4, [2] * 4)[0] == [1.0] * 4


def test_closing_ends_the_processes(tmp_path):
    path = write(tmp_path, WORKER_REWARDS)
    scorer = build(RewardSettings(functions={"p": f"{path}:process"}, workers=1), None, max_new_tokens=8)
    pid = int(scorer(*BATCH)[0][0])
    os.kill(pid, 0)
    scorer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    scorer.close()  # twice does no harm


def test_importing_rewards_and_data_loads_nothing_heavy():
    code = (
        "import sys, cispo_jax.rewards, cispo_jax.data\n"
        "print(sorted({'jax', 'tensorflow_datasets', 'reasoning_gym', 'grain', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=import_path())
    assert done.stdout.strip() == "[]"


def import_path():
    import cispo_jax

    return {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(cispo_jax.__file__))}


# ---- scoring while others are sampled


def test_groups_that_were_begun_are_scored_once_and_give_the_same():
    """In any order, with others that were not; the scores of a whole call."""
    rows = dict(
        responses=[f"Answer: {i}" for i in range(12)],
        examples=[{"id": i, "answer": str(3 * i)} for i in range(4) for _ in range(3)],
        finish_reasons=["stop"] * 12,
        response_tokens=list(range(12)),
    )
    group = lambda i: {name: values[3 * i : 3 * i + 3] for name, values in rows.items()}
    with Scorer({"task": exact_match}) as inline, Scorer({"task": exact_match}, workers=2) as scorer:
        expected = inline(**rows)
        asked = []
        submit = scorer._workers.submit
        scorer._workers.submit = lambda *request: asked.append(request[-1]) or submit(*request)
        for i in (2, 0):
            scorer.begin(**group(i))
        assert len(asked) == 2 and scorer(**rows) == expected
        assert sorted(rows.examples[0]["id"] for rows in asked) == [0, 1, 2, 3]
        # What was begun for one call is gone after it; other responses are scored for themselves.
        scorer.begin(**group(1))
        other = {**rows, "responses": ["Answer: 0"] * 12}
        assert scorer(**other) == inline(**other)
        inline.begin(**group(0))
        assert inline(**rows) == expected


def test_a_function_that_is_broken_says_so_when_the_scores_are_asked_for(tmp_path):
    path = write(tmp_path, "def f(responses, **_): return 'all good'")
    group = (["a"], [{"id": 1, "answer": "a"}], ["stop"], [1])
    with Scorer({"mine": f"{path}:f"}, workers=1) as scorer:
        scorer.begin(*group)
        with pytest.raises(RewardError, match="returned 'all good'"):
            scorer(*group)
