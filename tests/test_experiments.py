"""The commands on the debug page: a warm start, training that goes on from it, evaluation of what is there."""

import json
from pathlib import Path

import commands
import jax
import numpy as np
import pytest

from cispo_jax import weights
from cispo_jax.training.checkpoint import Checkpoints

SMALL = """
--config=configs/debug.py --config.num_steps=2 --config.sft.num_steps=40 --config.sft.batch_size=16
--config.data.train_size=32 --config.data.eval_size=8 --config.data.options.operations=+
--config.data.options.max_value=4 --config.evaluation.every=0 --config.sampling.prompts_per_step=4
--config.sampling.group_size=4 --config.sampling.max_new_tokens=10 --config.sampling.dynamic=False
--config.logging.tensorboard=False
""".split()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    run, other = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("other")
    small = [*SMALL, f"--config.data.directory={tmp_path_factory.mktemp('sets')}"]
    names = {
        "sft": ["experiments.sft", *small, f"--workdir={run}"],
        "evaluate_sft": ["experiments.evaluate", *small, f"--workdir={run}"],
        "train": ["experiments.train", *small, f"--workdir={run}"],
        "evaluate": ["experiments.evaluate", *small, f"--workdir={run}", "--step=1"],
        "export": ["experiments.export", *small, f"--workdir={run}", f"--output={other / 'exported'}"],
        "export_again": ["experiments.export", *small, f"--workdir={run}", f"--output={other / 'exported'}"],
        "export_nothing": ["experiments.export", *small, f"--workdir={other}"],
        "export_int8": ["experiments.export", *small, f"--workdir={run}", "--dtype=int8"],
        "wrong_step": ["experiments.evaluate", *small, f"--workdir={run}", "--step=9"],
        "evaluate_start": ["experiments.evaluate", *small, f"--workdir={other}"],
        "no_sft": ["experiments.sft", *small, "--config.sft.num_steps=0", f"--workdir={other}"],
    }
    return run, dict(zip(names, commands.run(*names.values()), strict=True))


def done(results, name):
    code, out, err = results[1][name]
    assert code == 0, err
    return out


def test_the_warm_start_stands_alone_and_is_evaluated(results):
    out = done(results, "sft")
    assert "warm start 40/40" in out and "held-out after step 0" in out
    losses = [float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if line.startswith("warm start")]
    assert losses[-1] < 0.9 * losses[0]


def test_training_goes_on_from_the_warm_start(results):
    workdir, _ = results
    out = done(results, "train")
    assert "resumed after rollout step 0 of 2" in out and "warm start" not in out
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    # Warmed up and not random: a fresh model has 2.75 nats of the ln 16 = 2.77 that are possible.
    assert lines[1]["policy/entropy"] < 2.7


def test_evaluation_prints_its_metrics_as_json(results):
    workdir, _ = results
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for name, step in (("evaluate_sft", 0), ("evaluate", 1), ("evaluate_start", 0)):
        found = json.loads(done(results, name).splitlines()[-1])
        assert found["step"] == step and 0 <= found["eval/accuracy"] <= 1 and "eval/avg@2" in found
        if name == "evaluate_sft":
            assert found["eval/length"] == lines[0]["eval/length"] and found["eval/avg@2"] == lines[0]["eval/avg@2"]
    assert "no checkpoint" in done(results, "evaluate_start")
    records = (workdir / "evaluations/command_step_000001.jsonl").read_text().splitlines()
    assert len(records) == 8 and {"prompt", "answer", "response", "verdict"} <= set(json.loads(records[0]))
    assert (workdir / "evaluations/step_000000.jsonl").exists()  # the run's own is not written over


def test_the_export_is_the_newest_checkpoint(results):
    folder = Path(done(results, "export").split("rollout step 2: ")[1].split("\n")[0])
    model, config = weights.load_pretrained(folder)
    assert config.file_dtype == "float32" and weights.load_tokenizer(folder).encode("1+2") == [3, 12, 4]
    checkpoints = Checkpoints(results[0] / "checkpoints", keep=9)
    kept = checkpoints.restore_model(2, model, jax.tree.map(lambda leaf: leaf.sharding, model))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(model), jax.tree.leaves(kept))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_step", ["--step=9", "1, 2"]),
        ("no_sft", ["config.sft.num_steps=0"]),
        ("export_again", ["exported already holds weights"]),
        ("export_nothing", ["holds no checkpoint"]),
        ("export_int8", ["--dtype=int8", "float32, bfloat16"]),
    ],
)
def test_what_is_not_there_is_refused(results, name, words):
    code, _, err = results[1][name]
    assert code == 2 and "Traceback" not in err and all(word in " ".join(err.split()) for word in words), err
