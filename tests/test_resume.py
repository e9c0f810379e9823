"""Killed and started again with the same command, a run ends with the numbers of one that was never stopped.

Each process is the real command on the debug page; SIGKILL comes after a given line of metrics.jsonl, or inside a save.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = """
--config=configs/debug.py --config.num_steps=4 --config.data.train_size=12 --config.data.eval_size=4
--config.evaluation.samples=0 --config.sampling.prompts_per_step=4 --config.evaluation.every=2
--config.logging.tensorboard=False --config.sampling.dynamic=False
""".split()
# Every group has a signal, so that every step moves the weights.
REWARD = """
def digits(responses, **_):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in responses]
"""
VOLATILE = ("time/", "memory/", "tokens/per_second")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One device, a shared compile cache and data directory."""
    sets = tmp_path_factory.mktemp("sets")
    (sets / "reward.py").write_text(REWARD)
    keep = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))
    return {**keep, "JAX_COMPILATION_CACHE_DIR": cache, "TFDS_DATA_DIR": str(sets)}


def command(workdir, environment, *extra):
    argv = [
        sys.executable,
        "-m",
        "experiments.train",
        *SMALL,
        f"--config.data.directory={environment['TFDS_DATA_DIR']}",
        f"--config.rewards.digits={environment['TFDS_DATA_DIR']}/reward.py:digits",
    ]
    return [*argv, f"--workdir={workdir}", *extra]


def finish(workdir, environment, *extra):
    done = subprocess.run(
        command(workdir, environment, *extra), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def kill_when(ready, workdir, environment):
    """Starts the run and kills it as soon as `ready()`."""
    with subprocess.Popen(
        command(workdir, environment), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 300
        while not ready():
            assert process.poll() is None, "the run ended before the moment came"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)


def lines(workdir):
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(workdir):
    return [{k: v for k, v in line.items() if not k.startswith(VOLATILE)} for line in lines(workdir)]


def count(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def reference(tmp_path_factory, environment):
    workdir = tmp_path_factory.mktemp("runs") / "reference"
    finish(workdir, environment)
    assert [line["step"] for line in lines(workdir)] == [0, 1, 2, 3, 4]
    assert all(line["updates"] == 4 and line["grad/norm"] > 0.01 for line in lines(workdir)[1:])
    return workdir


def check(workdir, reference):
    assert numbers(workdir) == numbers(reference)
    for step in (1, 2, 3, 4):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (workdir / name).read_text() == (reference / name).read_text()
    assert (workdir / "evaluations/step_000004.jsonl").read_text() == (
        reference / "evaluations/step_000004.jsonl"
    ).read_text()


def saving(workdir, step):
    """True while the checkpoint of `step` is being written and not complete."""
    return (
        any((workdir / "checkpoints").glob(f"{step}.orbax-checkpoint-tmp*"))
        if (workdir / "checkpoints").exists()
        else False
    )


def test_killed_three_times_it_ends_with_the_same_numbers(tmp_path, reference, environment):
    workdir = tmp_path / "run"
    kill_when(lambda: count(workdir) >= 1, workdir, environment)  # after the first evaluation: nothing is saved yet
    kill_when(lambda: count(workdir) >= 3, workdir, environment)  # right after a line, before or inside its save
    kill_when(lambda: saving(workdir, 4) or count(workdir) >= 5, workdir, environment)  # inside the last save
    out = finish(workdir, environment)
    check(workdir, reference)
    assert "resumed after rollout step" in out
    # What the kills left behind was moved, not lost: the lines of both files are those that were written.
    discarded = [json.loads(line)["step"] for line in (workdir / "discarded/metrics.jsonl").read_text().splitlines()]
    assert discarded and all(0 <= step <= 4 for step in discarded)
    assert "Run directory" in finish(workdir, environment)  # a finished run: nothing to do, exit 0
    check(workdir, reference)


def test_noresume_refuses_a_run(reference, environment):
    done = subprocess.run(
        command(reference, environment, "--noresume"), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--noresume" in done.stderr and "Traceback" not in done.stderr
    assert len(lines(reference)) == 5


def test_a_torn_line_and_an_unfinished_checkpoint_are_survived(tmp_path, reference, environment):
    """O-30: the folder of a save that never completed is not chosen, and its step is written again.

    O-29: 12 prompts, 4 a step: the checkpoint of step 3 lies exactly at the end of an epoch, and step 4 begins the next.
    """
    workdir = tmp_path / "run"
    shutil.copytree(reference, workdir)
    (workdir / "checkpoints/4").rename(workdir / "checkpoints/4.orbax-checkpoint-tmp")
    text = (workdir / "metrics.jsonl").read_text()
    (workdir / "metrics.jsonl").write_text(text[: text.rindex('"updates"')])  # the last line is cut short
    out = finish(workdir, environment, "--config.checkpoint.keep=3")
    assert "resumed after rollout step 3 of 4" in out and "checkpoint.keep: 2 -> 3" in out
    check(workdir, reference)
    assert (workdir / "checkpoints/4").exists() and not list((workdir / "checkpoints").glob("4.orbax*"))
    prompts = {json.loads(line)["prompt"] for line in (workdir / "rollouts/step_000004.jsonl").read_text().splitlines()}
    assert len(prompts) == 4
