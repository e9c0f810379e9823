"""The README does what it says: its snippets run, its commands parse, its files are there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cispo_jax
from cispo_jax.config import ConfigError
from cispo_jax.rewards import Scorer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = [text.replace("\\\n", " ") for language, text in BLOCKS if language == "bash"]
COMMANDS = [line for text in SHELL for line in text.splitlines() if "-m experiments." in line]
SAVED = dict(re.findall(r"Save this as `(\S+\.py)`:\n\n```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))


def test_the_loss_in_ten_lines(capsys):
    snippet = next(text for language, text in BLOCKS if language == "python")
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    exec(compile(snippet, "README.md", "exec"), {})
    cispo, ppo = capsys.readouterr().out.splitlines()
    assert cispo.startswith("cispo_loss") and ppo.startswith("ppo_loss")
    cispo, ppo = (json.loads(re.search(r"\[\[.*\]\]", line).group()) for line in (cispo, ppo))
    assert ppo[0][0] == 0 > cispo[0][0]  # a good rare token, r = 1.25
    assert ppo[0][1] == cispo[0][1] < 0 and ppo[1] == cispo[1]  # nothing else is dropped


def test_the_two_commands_come_first_and_are_targets():
    commands = [line.split("#")[0].strip() for line in SHELL[0].splitlines()]
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.removeprefix("make ") for command in commands} <= set(targets)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_parses(command):
    words = shlex.split(command)
    start = words.index("-m")
    assert (ROOT / f"{words[start + 1].replace('.', '/')}.py").is_file()
    if words[-1].startswith("--compare="):  # a command of its own, without a page
        words = [*words[:-1], "--compare=only.jsonl"]
        done = subprocess.run([sys.executable, *words[start:]], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, "two files of records" in done.stderr) == (2, True), done.stderr
        return
    code = "import sys; from experiments import cli; cli.define_flags(); cli.parse(sys.argv)"
    done = subprocess.run([sys.executable, "-c", code, *words[start + 2 :]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_own_data_reward_and_objective(tmp_path):
    """The newcomer's files and flags, all in one run, on the debug page instead of the 135M model."""
    for name, text in SAVED.items():
        (tmp_path / name).write_text(text)
    assert set(SAVED) == {"my_reward.py", "sapo.py"}
    assert len(SAVED["my_reward.py"].splitlines()) <= 10 and len(SAVED["sapo.py"].splitlines()) <= 20
    write = next(text for text in SHELL if "problems.jsonl" in text)
    subprocess.run(["sh", "-c", write], cwd=tmp_path, check=True)
    assert len((tmp_path / "problems.jsonl").read_text().splitlines()) == 20

    flags = [
        word
        for command in COMMANDS
        for word in shlex.split(command)
        if re.match(r"--config\.(data|rewards|objective)", word)
    ]
    assert len(flags) == 3
    page = [
        f"--config={ROOT}/configs/debug.py",
        "--workdir=run",
        "--config.num_steps=1",
        "--config.sampling.dynamic=false",
    ]
    fit = ["--config.model.tokenizer=characters:0123456789 ?Whatisme", "--config.data.max_prompt_tokens=24"]
    command = [sys.executable, "-m", "experiments.train", *page, *flags, *fit]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "16 training and 4 held-out problems" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["updates"] == 4
    assert {"clip/dropped_ppo", "clip/dropped_dapo", "clip/at_cap", "policy/ratio_max", "policy/entropy"} <= set(
        metrics[-1]
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert {name for row in rows for name in row["parts"]} == {"mine"}


def test_a_typo_in_a_reward_gets_the_fields(tmp_path):
    (tmp_path / "my_reward.py").write_text(SAVED["my_reward.py"].replace('example["answer"]', 'example["answr"]'))
    scorer = Scorer({"mine": f"{tmp_path}/my_reward.py:reward"})
    with pytest.raises(ConfigError, match=r"no field 'answr'.*Did you mean \"answer\"\? It has: id, prompt, answer"):
        scorer.check({"id": "a", "prompt": "What is 1 times 3?", "answer": "3"})


def test_the_files_it_names_are_there():
    made = {"my_reward.py", "sapo.py"}  # by the reader
    names = set(re.findall(r"`([\w./]+\.(?:py|md|cff))`", README)) - made
    assert len(names) > 15
    folders = (ROOT, ROOT / "cispo_jax", ROOT / "configs")
    assert [name for name in sorted(names) if not any((folder / name).is_file() for folder in folders)] == []


def test_the_version_is_the_same_everywhere():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == cispo_jax.__version__
    assert re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == cispo_jax.__version__
