"""Several processes as one run: real ones, each with CPU devices of its own, and what a single one must not notice."""

import json
import os
import signal
import subprocess
import sys
import time

import debug_run
import jax
import processes
import pytest

from cispo_jax import distributed, trainer
from cispo_jax.config import ConfigError

PARTS = "tests/process_parts.py"
SMALL = {
    "sampling__prompts_per_step": 2,
    "objective__num_minibatches": 2,
    "sampling__group_size": 4,
    "model__remat": "off",
}


def numbers(folder):
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "tokens/per_second"))} for line in lines
    ]


def count(folder):
    path = folder / "run/metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def settings(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(changes))
    return [PARTS, "train", folder]


def check_equal(found, expected):
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4), (name, mine[name], theirs[name])


# ---- one process


def test_one_process_notices_nothing(monkeypatch):
    distributed.initialize()
    distributed.initialize("localhost:1234", 1, 0)
    assert not jax.distributed.is_initialized() and distributed.is_main()
    for name, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "a",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    distributed.initialize()
    assert not jax.distributed.is_initialized() and sys.excepthook is not distributed._end_all
    assert distributed.gather({1: 2}) == [{1: 2}] and distributed.share(5) == slice(0, 5)
    assert distributed.divide(lambda mine: list(range(9))[mine], 9) == list(range(9))
    distributed.barrier("alone")
    with distributed.main_first("alone"):
        pass


def test_the_number_of_processes_comes_from_the_cluster(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert distributed._cluster_size() == 1  # an sbatch script: srun has not started the tasks yet
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "1")
    assert distributed._cluster_size() == 4
    monkeypatch.delenv("SLURM_NTASKS")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1:34911")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert distributed._cluster_size() == 3
    known = {env.name for env in distributed.clusters.ClusterEnv._cluster_types}
    assert set(distributed.CLUSTERS) <= known  # jax renames nothing unseen


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("localhost:1", None, None), ["--coordinator=localhost:1", "--num_processes, --process_id"]),
        ((None, 2, 0), ["--num_processes=2", "without --coordinator"]),
        (("localhost", 2, 0), ["--coordinator=localhost", "HOST:PORT"]),
        (("localhost:70000", 2, 0), ["--coordinator=localhost:70000", "65535"]),
        (("localhost:1", 0, 0), ["--num_processes=0", "at least 1"]),
        (("localhost:1", 2, 2), ["--process_id=2", "0 to 1"]),
        (("localhost:1", 2, -1), ["--process_id=-1", "0 to 1"]),
    ],
)
def test_bad_flags(flags, words):
    with pytest.raises(ConfigError) as error:
        distributed.initialize(*flags)
    assert all(word in str(error.value) for word in words)


def test_sigterm_ends_a_run_after_its_step_and_the_same_call_goes_on(tmp_path, monkeypatch):
    """The signal comes while step 2 is scored; the numbers are those of a run that was never stopped."""
    debug_run.on_one_device(monkeypatch)
    config = debug_run.config(num_steps=3, checkpoint__every=100, **SMALL)
    calls = []

    def reward(responses, **_):
        calls.append(len(responses))
        if len(calls) == 4 and signal_at_2:  # after the trial, the evaluation and step 1
            os.kill(os.getpid(), signal.SIGTERM)
        return [float(len(text)) for text in responses]

    def train(folder):
        calls.clear()
        return trainer.train(config, folder, dataset=debug_run.SUMS, reward=reward, model=debug_run.model())

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    before, signal_at_2 = signal.getsignal(signal.SIGTERM), False
    train(tmp_path / "a/run")
    signal_at_2 = True
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "b/run")
    assert stopped.value.code == 75 and [line["step"] for line in numbers(tmp_path / "b")] == [0, 1, 2]
    signal_at_2 = False
    train(tmp_path / "b/run")
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a") and len(numbers(tmp_path / "a")) == 4
    assert signal.getsignal(signal.SIGTERM) is before


# ---- two processes


def test_what_travels_between_two_processes(tmp_path):
    processes.run([PARTS, "travel", tmp_path], tmp_path)


def test_two_processes_train_as_one_does(tmp_path, monkeypatch):
    """Forced rollouts; 2 x 2 devices against one, whose programs other tests have compiled. 2 x 4 against 8 is a slow test."""
    import process_parts

    debug_run.on_one_device(monkeypatch)
    argv = settings(tmp_path / "two", **SMALL)
    two = processes.run(argv, tmp_path / "two")
    settings(tmp_path / "one", **SMALL)
    debug_run.on_devices(monkeypatch, 4)
    process_parts.train(tmp_path / "one")
    check_equal(numbers(tmp_path / "two"), numbers(tmp_path / "one"))
    for name in ("rollouts/step_000002.jsonl", "evaluations/step_000002.jsonl", "config.json"):
        assert (tmp_path / "two/run" / name).read_text() == (tmp_path / "one/run" / name).read_text()
    # Each scored its half (the trial call before training comes on top), one printed.
    scored = [json.loads((tmp_path / f"two/scored_{i}.json").read_text()) for i in range(2)]
    whole = json.loads((tmp_path / "one/scored_0.json").read_text())
    assert len(scored[0]) == len(scored[1]) and sorted(scored[0][1:] + scored[1][1:]) == sorted(whole[1:])
    assert "step 2/2" in two.out(0) and not two.out(1)


def test_killing_one_process_ends_the_other(tmp_path):
    with processes.Processes([PARTS, "wait", tmp_path], tmp_path) as two:
        two.wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
        two.started[1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        assert two.started[0].wait(60) != 0
        assert time.monotonic() - start < 60


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_other(tmp_path):
    with processes.Processes([PARTS, "fail", tmp_path], tmp_path) as two:
        codes = two.wait(60)
        assert codes[1] == 1 and codes[0] != 0 and "ValueError: only here" in two.err(1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_processes_of_four_devices_train_as_one_of_eight(tmp_path):
    two = settings(tmp_path / "two")
    one = settings(tmp_path / "one")
    processes.run(two, tmp_path / "two", devices=4)
    with processes.Processes(one, tmp_path / "one", count=1, devices=8) as alone:
        assert alone.wait(600) == [0], alone.errors()
    check_equal(numbers(tmp_path / "two"), numbers(tmp_path / "one"))
    assert len(numbers(tmp_path / "one")) == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_training_process_that_is_killed_takes_the_other_along_and_any_number_goes_on(tmp_path):
    """Killed, then SIGTERM to one of two (75 from both), then one process on another mesh: the numbers of two undisturbed ones."""
    whole = settings(tmp_path / "whole", num_steps=4, **SMALL)
    processes.run(whole, tmp_path / "whole")
    folder = tmp_path / "run"
    argv = settings(folder, num_steps=4, **SMALL)
    with processes.Processes(argv, folder) as two:
        two.wait_until(lambda: count(folder) >= 2)
        two.started[1].send_signal(signal.SIGKILL)
        assert two.started[0].wait(60) != 0
    settings(folder, num_steps=400, checkpoint__every=1000, **SMALL)
    with processes.Processes(argv, folder) as two:
        lines = count(folder)
        two.wait_until(lambda: count(folder) > lines or "resumed" in two.out(0))
        two.started[1].send_signal(signal.SIGTERM)
        assert two.wait() == [75, 75], two.errors()
        assert "stopped by SIGTERM after rollout step" in two.out(0) and not two.out(1)
    steps = count(folder) - 1
    settings(tmp_path / "whole", num_steps=steps + 1, **SMALL)
    processes.run(whole, tmp_path / "whole")
    settings(folder, num_steps=steps + 1, mesh__data=2, mesh__fsdp=2, **SMALL)
    alone = processes.run(argv, folder, count=1, devices=4)
    assert f"resumed after rollout step {steps}" in alone.out(0)
    check_equal(numbers(folder), numbers(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_checkpoints_and_weights_of_two_processes(tmp_path):
    """Written by two processes: bit-equal when read by two and by one, on other meshes; a Hugging Face folder in and out."""
    for index in range(2):
        (tmp_path / f"values_{index}").mkdir()
    processes.run([PARTS, "write", tmp_path], tmp_path / "write")
    processes.run([PARTS, "read", tmp_path], tmp_path / "read")
    processes.run([PARTS, "read", tmp_path], tmp_path / "read_alone", count=1, devices=4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_users_error_appears_once_and_all_commands_take_the_flags(tmp_path):
    """One bad setting that both processes see; then each command on two processes."""
    page = [
        "--config=configs/debug.py",
        "--config.num_steps=1",
        "--config.logging.tensorboard=False",
        f"--workdir={tmp_path}/run",
    ]
    page += [
        f"--config.data.directory={tmp_path}/sets",
        "--config.sft.num_steps=2",
        "--config.sampling.prompts_per_step=4",
        "--config.sampling.max_new_tokens=16",
    ]
    with processes.Processes(
        ["-m", "experiments.train", *page, "--config.mesh.data=3"], tmp_path / "bad", devices=1
    ) as two:
        assert two.wait() == [2, 2], two.errors()
        assert "error: " in two.err(0) and "mesh.data=3" in two.err(0) and "error" not in two.err(1)
    for command in ("sft", "train", "evaluate", "export"):
        extra = [f"--output={tmp_path}/model"] if command == "export" else []
        two = processes.run(["-m", f"experiments.{command}", *page, *extra], tmp_path / command, devices=1)
        assert two.out(0) and not two.out(1)
        if command == "evaluate":
            assert json.loads(two.out(0).splitlines()[-1])["step"] == 1
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.slow
def test_an_error_that_one_process_sees_alone_is_printed_and_ends_both(tmp_path):
    page = ["--config=configs/debug.py", f"--workdir={tmp_path}/run", f"--config.data.directory={tmp_path}/sets"]
    port = processes.free_port()
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    started = []
    for index, extra in enumerate([[], ["--config.model.tokenizer=nowhere.json"]]):
        flags = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}"]
        command = [sys.executable, "-m", "experiments.train", *page, *extra, *flags]
        started.append(
            subprocess.Popen(
                command,
                cwd=processes.ROOT,
                env=environment,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
        )
    errors = [process.communicate(timeout=240)[1] for process in started]
    assert started[1].returncode == 2 and "nowhere.json" in errors[1] and started[0].returncode != 0
