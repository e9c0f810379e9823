"""The launchers run, with stubs of what they call that start local processes: two workers, one preempted, started again, same numbers."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parent.parent
PAGE = """
--config=configs/debug.py --config.num_steps=4 --config.data.train_size=12 --config.data.eval_size=4
--config.evaluation.samples=0 --config.sampling.prompts_per_step=4 --config.evaluation.every=0
--config.logging.tensorboard=False --config.sampling.dynamic=False --config.checkpoint.every=100 --config.model.remat=off
""".split()
# Leaves the id of every process that scores, so that the test can preempt one; slow enough for it to be in time.
REWARD = """
import os, pathlib, time
def digits(responses, **_):
    pathlib.Path(__file__).with_name(f"{os.getpid()}.pid").touch()
    time.sleep(0.5)
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in responses]
"""
# What the stubs share: the tasks of a cluster that jax detects, run side by side.
TASKS = """
import os, pathlib, shutil, subprocess, sys
here = pathlib.Path(os.environ["STUBS"])
with (here / "calls").open("a") as file:
    file.write(" ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]).replace("\\n", " ") + "\\n")

def run(commands):
    cluster = {"SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", "7"), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(len(commands))}
    started = []
    for i, (argv, folder) in enumerate(commands):
        task = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
        started.append(subprocess.Popen(argv, cwd=folder, env=os.environ | cluster | task))
    return [process.wait() for process in started]
"""
SBATCH = """
options = [arg for arg in sys.argv[1:] if arg.startswith("--") and "=" in arg and not arg.startswith(("--config", "--workdir"))]
given = dict(option[2:].split("=", 1) for option in options)
script, *rest = [arg for arg in sys.argv[1:] if arg not in options and arg not in ("--requeue",)]
assert given["export"] == "ALL" and given["signal"].startswith("TERM@") and "--requeue" in sys.argv
shutil.copy(script, here / "spooled.sh")  # SLURM runs a copy
tasks = str(int(given["nodes"]) * int(given["ntasks-per-node"]))
job = {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": os.getcwd(), "TASKS": tasks}
while True:
    code = subprocess.run(["bash", here / "spooled.sh", *rest], cwd="/", env=os.environ | job).returncode
    if not (here / "requeued").exists():
        sys.exit(code)
    assert code == 75
    (here / "requeued").unlink()
"""
SRUN = """
argv = [arg for arg in sys.argv[1:] if not arg.startswith("--kill")]
sys.exit(max(code if code >= 0 else 128 - code for code in run([(argv, os.getcwd())] * int(os.environ["TASKS"]))))
"""
SCONTROL = """
assert sys.argv[1:] == ["requeue", "4711"]
(here / "requeued").touch()
"""
SSH = """
host, command = sys.argv[1:]
sys.exit(subprocess.run(["bash", "-c", command], cwd=here).returncode)
"""
# A pod of two workers without a common folder; it is preempted once, when a command ends with 75.
GCLOUD = """
verb, rest = sys.argv[4], sys.argv[5:]
state, workers = here / "state", [here / f"worker_{i}" for i in range(2)]
if verb == "describe":
    sys.exit(print(state.read_text()) if state.exists() else 1)
if verb == "create":
    assert not state.exists() and "--accelerator-type=v5p-16" in rest and "--spot" in rest
    state.write_text("READY")
    for worker in workers:
        worker.mkdir()
if verb == "delete":
    state.unlink()
    for worker in workers:
        shutil.rmtree(worker)
if verb == "scp":
    for worker in workers:
        shutil.copy(rest[0], worker / rest[1].partition(":")[2])
if verb == "ssh":
    (command,) = [arg.partition("=")[2] for arg in rest if arg.startswith("--command=")]
    codes = run([(["bash", "-c", command], worker) for worker in workers])
    if 75 in codes:
        state.write_text("PREEMPTED")
    sys.exit(next((code for code in codes if code), 0))
"""
STUBS = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "ssh": SSH, "gcloud": GCLOUD}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Stubs on PATH, a reward, a data set; one CPU device a process."""
    here = tmp_path_factory.mktemp("stubs")
    for name, body in STUBS.items():
        file = here / name
        file.write_text(f"#!{sys.executable}\n{TASKS}{body}")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "PYTHON": sys.executable, "JAX_NUM_CPU_DEVICES": "1"}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    sets = tmp_path_factory.mktemp("sets")

    def make(folder):
        (folder / "reward.py").write_text(REWARD)
        run = [f"--workdir={folder}/run", f"--config.rewards.digits={folder}/reward.py:digits"]
        return [*PAGE, f"--config.data.directory={sets}", *run]

    return make


@pytest.fixture(scope="module")
def reference(tmp_path_factory, arguments):
    """The numbers of two processes that nobody interrupts."""
    folder = tmp_path_factory.mktemp("reference")
    processes.run(["-m", "experiments.train", *arguments(folder)], folder, devices=1)
    found = numbers(folder)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4] and all(line["grad/norm"] > 0.01 for line in found[1:])
    return found


def numbers(folder):
    path = folder / "run/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "tokens/per_second"))} for line in lines
    ]


def alive(folder):
    pids = [int(path.stem) for path in folder.glob("*.pid")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def preempt_and_finish(command, folder, environment):
    """Runs a launcher, sends one worker SIGTERM after the first step, and returns how the launcher ended."""
    stubs = folder / "stubs"
    stubs.mkdir()
    environment = environment | {"STUBS": str(stubs), "JAX_COORDINATOR_PORT": str(processes.free_port())}
    with (folder / "out").open("w") as out:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 600
        while len(numbers(folder)) < 2:
            assert launcher.poll() is None and time.monotonic() < deadline, (folder / "out").read_text()
            time.sleep(0.05)
        os.kill(alive(folder)[-1], signal.SIGTERM)
        code = launcher.wait(600)
    finally:
        launcher.kill()
        for pid in alive(folder):
            os.kill(pid, signal.SIGKILL)
    text = (folder / "out").read_text()
    assert "stopped by SIGTERM after rollout step" in text and "resumed after rollout step" in text, text
    assert len(list(folder.glob("*.pid"))) == 4, text  # two workers, started twice
    return code, (stubs / "calls").read_text().splitlines() if (stubs / "calls").exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_host_over_ssh(tmp_path, arguments, reference, environment):
    extra = {"SSH_HOST": "me@there", "DIRECTORY": str(ROOT), "PROCESSES": "2", "PORT": str(processes.free_port())}
    code, calls = preempt_and_finish(
        ["experiments/launch/host.sh", *arguments(tmp_path)], tmp_path, environment | extra
    )
    assert code == 0 and numbers(tmp_path) == reference
    assert len(calls) == 1 and calls[0].startswith("ssh me@there cd ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_slurm(tmp_path, arguments, reference, environment):
    extra = {"NODES": "2", "GPUS": "1"}
    code, calls = preempt_and_finish(
        ["experiments/launch/slurm.sh", *arguments(tmp_path)], tmp_path, environment | extra
    )
    assert code == 0 and numbers(tmp_path) == reference
    assert [call.split()[0] for call in calls] == ["sbatch", "srun", "scontrol", "srun"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tpu_pod(tmp_path, arguments, reference, environment):
    python = f"mkdir -p .venv/bin; printf '#!/bin/sh\\nexec {sys.executable} \"$@\"' > .venv/bin/python; chmod +x .venv/bin/python"
    extra = {
        "NAME": "run",
        "ZONE": "here",
        "TYPE": "v5p-16",
        "SPOT": "1",
        "SETUP": "true",
        "INSTALL": python,
        "PAUSE": "0",
    }
    code, calls = preempt_and_finish(
        ["experiments/launch/tpu_pod.sh", *arguments(tmp_path)], tmp_path, environment | extra
    )
    assert code == 0 and numbers(tmp_path) == reference
    once = ["create", "scp", "ssh", "ssh"]
    assert [call.split()[4] for call in calls] == ["describe", *once, "describe", "delete", *once]


def test_sigterm_to_the_launcher_ends_the_run_for_good(tmp_path):
    """A stand-in for the command: stops with 75 when asked, as `experiments.train` does."""
    (tmp_path / "waits.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "pathlib.Path(sys.argv[1]).open('a').write('started ')\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHON": sys.executable, "COMMAND": "waits", "PYTHONPATH": str(tmp_path)}
    started = tmp_path / "started"
    with subprocess.Popen(["experiments/launch/host.sh", str(started)], cwd=ROOT, env=environment) as launcher:
        while not started.exists():
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 75
    assert started.read_text() == "started "
