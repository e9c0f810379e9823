"""Finding a user's reward function, and saying what is wrong with it."""

import pytest

from cispo_jax.config import ConfigError
from cispo_jax.rewards import load_function, resolve

GOOD = """
def short(responses, *, examples, finish_reasons, response_tokens):
    return [1.0 if n < 10 else 0.0 for n in response_tokens]

def lenient(responses, **kwargs):
    return [float(len(r)) for r in responses]

def old_style(prompts, completions):
    return [0.0 for _ in completions]

LIMIT = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(GOOD)
    return path


def test_file_and_module(file, monkeypatch):
    kwargs = {"examples": [{}], "finish_reasons": ["stop"], "response_tokens": [3]}
    assert resolve(f"{file}:short")(["x"], **kwargs) == [1.0]
    assert resolve(f"{file}:lenient")(["xyz"], **kwargs) == [3.0]
    monkeypatch.chdir(file.parent)
    assert resolve("my_rewards.py:short") is resolve(f"{file}:short")  # one module a file, its globals shared
    assert resolve("cispo_jax.rewards:exact_match")(["4"], examples=[{"answer": "4"}]) == [1.0]
    assert load_function(f"{file}:old_style", "objective.name")([], [1]) == [0.0]  # any signature


def test_files_of_the_same_name_do_not_collide(tmp_path):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(f"def f(responses, **_): return [{value}]")
    assert [resolve(f"{tmp_path}/{folder}/r.py:f")(["x"]) for folder in "ab"] == [[1.0], [2.0]]


def test_a_file_may_define_dataclasses(tmp_path):
    (tmp_path / "d.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n"
        "def f(responses, **_): return [float(A().x)]"
    )
    assert resolve(f"{tmp_path}/d.py:f")(["x"]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{dir}/my_rewards.py:shrt", r"has no shrt\. Did you mean .short.\? It defines: short, lenient, old_style\."),
        ("{dir}/my_reward.py:short", r"there is no file .*my_reward\.py\. Did you mean .my_rewards\.py."),
        ("{dir}/nowhere/r.py:short", r"there is no file .*nowhere does not exist"),
        ("{dir}/my_rewards.py:LIMIT", r"LIMIT is a int, not a function"),
        (
            "{dir}/my_rewards.py:old_style",
            r"cannot be called as a reward .*old_style\(prompts, completions\).*\*\*kwargs",
        ),
        ("{dir}/my_rewards.py", r"names no function; write module:function or path/file\.py:function"),
        ("my_rewards:short", r"module my_rewards cannot be imported.*write its path: my_rewards\.py:short"),
        ("cispo_jax.rewards:exact_mach", r"has no exact_mach"),
        ("", r"names no function"),
    ],
)
def test_errors_name_the_setting_and_what_is_there(file, spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(spec.format(dir=file.parent), "config.rewards.mine")
    assert str(caught.value).startswith("config.rewards.mine=")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:\n", r"SyntaxError: .*line 1"),
        ("import surely_not_installed\n", r"ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(broken\.py:2\)"),
    ],
)
def test_a_file_that_does_not_import(tmp_path, source, message):
    (tmp_path / "broken.py").write_text(source)
    for _ in range(2):  # the second time as well: a failed import leaves nothing behind
        with pytest.raises(ConfigError, match=message):
            resolve(f"{tmp_path}/broken.py:f")
