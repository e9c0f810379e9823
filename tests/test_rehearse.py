"""The rehearsal: what shrinks and what must not, what stands in for what is not here, and the command's errors and exit codes."""

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import commands
import jax
import pytest

from cispo_jax import building, models, sharding, weights
from cispo_jax.config import Config, ConfigError, MeshSettings, SamplingMeshSettings, from_config_dict
from cispo_jax.data import hub
from cispo_jax.models import PRESETS
from cispo_jax.training.packing import Layout
from cispo_jax.weights import families
from experiments.rehearse import shrink, stages, stand_ins
from experiments.rehearse.rewards import varied

PAGES = sorted(p.stem for p in (Path(__file__).parent.parent / "configs").glob("*.py") if p.stem != "__init__")
# Widths, depth, lengths, counts; where files are; and the reward that random weights need.
MAY_CHANGE = set(
    """
    num_steps model.weights model.tokenizer mesh.data mesh.fsdp mesh.expert mesh.tensor mesh.sampling.expert mesh.sampling.tensor
    data.source data.eval_source data.directory data.train_size data.eval_size data.max_prompt_tokens
    rewards.rehearsal rewards.task rewards.workers rewards.overlong_buffer
    sampling.prompts_per_step sampling.group_size sampling.max_new_tokens sampling.slots sampling.sync_tokens
    objective.num_minibatches objective.num_epochs objective.micro_batch_tokens optimizer.warmup sft.num_steps sft.batch_size
    evaluation.every evaluation.num_problems evaluation.samples evaluation.batch_rows checkpoint.every logging.wandb profile.steps
    """.split()
)
NARROWED = {
    "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "rotary_dim", "attention", "mlp", "num_experts",
    "expert_dim", "shared_expert_dim",
}  # fmt: skip


def settings(**changes) -> Config:
    """Defaults with `sampling__group_size=2` and so on."""
    config = Config()
    for name, value in changes.items():
        section, _, key = name.partition("__")
        part = dataclasses.replace(getattr(config, section), **{key: value}) if key else value
        config = dataclasses.replace(config, **{section: part})
    return from_config_dict(config)


@pytest.mark.parametrize("name", PAGES)
def test_nothing_of_a_page_but_sizes_changes(name):
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config())
    changed = shrink.changes(config, shrink.shrink(config))
    sizes_of_sets = {name for name in changed if re.fullmatch(r"evaluation\.sets\.\w+\.(num_problems|samples)", name)}
    assert changed.keys() - sizes_of_sets <= MAY_CHANGE
    grown = [n for n, (before, after) in changed.items() if isinstance(before, int) and after > before > 0]
    assert set(grown) <= {"mesh.fsdp", "num_steps", "sampling.prompts_per_step"}, changed  # a row for each device


COUNTS = [
    # prompts, group, mini-batches -> prompts, group, mini-batches
    ((512, 16, 16), (32, 4, 2)),
    ((16, 8, 16), (2, 8, 2)),  # one group to a mini-batch
    ((8, 8, 1), (16, 4, 1)),  # one mini-batch stays one
    ((4, 3, 2), (32, 2, 2)),  # a group must divide the rows of the devices
    ((2, 32, 2), (2, 8, 2)),
]


@pytest.mark.parametrize(("before", "after"), COUNTS)
def test_what_was_several_stays_several(before, after):
    names = ("sampling__prompts_per_step", "sampling__group_size", "objective__num_minibatches")
    small = shrink.shrink(settings(**dict(zip(names, before, strict=True))))
    sampling, minibatches = small.sampling, small.objective.num_minibatches
    assert (sampling.prompts_per_step, sampling.group_size, minibatches) == after
    groups = sampling.prompts_per_step // minibatches
    layout = Layout.of(prompts=groups, group_size=sampling.group_size, prompt=30, response=16, devices=shrink.DEVICES)
    assert (layout.passes > 1) == (before[0] // before[2] > 1) and layout.rows == shrink.DEVICES


def test_lengths_keep_their_proportions():
    long = settings(
        num_steps=100, sampling__max_new_tokens=20_000, rewards__overlong_buffer=5_000, optimizer__warmup=25,
        sampling__prompts_per_step=64, sampling__slots=256, evaluation__samples=32, rewards__workers=64,
    )  # fmt: skip
    small = shrink.shrink(long)
    assert (small.sampling.max_new_tokens, small.rewards.overlong_buffer) == (16, 4)
    assert (small.num_steps, small.optimizer.warmup, small.evaluation.samples, small.rewards.workers) == (4, 1, 2, 2)
    assert 0 < small.sampling.slots < small.sampling.prompts_per_step * small.sampling.group_size
    assert shrink.shrink(long, demonstration=40).sampling.max_new_tokens == 40
    off = shrink.shrink(settings())
    assert (off.rewards.overlong_buffer, off.optimizer.warmup, off.sampling.slots, off.rewards.workers) == (0,) * 4
    assert off.objective.micro_batch_tokens == 0 and off.sft.num_steps == 0 and off.evaluation.samples == 0


def test_a_reward_of_ones_own_stays_alone_with_the_rehearsals():
    own = settings(rewards__functions={"mine": "my.py:reward"})
    assert shrink.shrink(own).rewards.task == "auto" and shrink.shrink(settings()).rewards.task == "on"
    assert shrink.shrink(own).rewards.functions == {"mine": "my.py:reward", "rehearsal": shrink.REWARD}


MESHES = [
    (MeshSettings(), (1, 8, 1, 1), (2, 4, 1, 1)),
    (MeshSettings(data=4), (2, 4, 1, 1), (4, 2, 1, 1)),
    (MeshSettings(data=-1, fsdp=1), (8, 1, 1, 1), (2, 4, 1, 1)),
    (MeshSettings(expert=8), (1, 4, 2, 1), (2, 2, 2, 1)),
    (MeshSettings(fsdp=1, tensor=8), (1, 4, 1, 2), (2, 2, 1, 2)),
    (MeshSettings(data=2, expert=16, tensor=4), (1, 2, 2, 2), (2, 1, 2, 2)),
    (MeshSettings(fsdp=1), (1, 8, 1, 1), (2, 4, 1, 1)),
]


@pytest.mark.parametrize(("full", "first", "second"), MESHES)
def test_a_split_axis_stays_split_on_eight_devices_and_the_restart_has_another(full, first, second):
    mesh = shrink.reduce_mesh(full)
    found = [tuple(getattr(m, axis) for axis in sharding.AXES) for m in (mesh, shrink.other_mesh(mesh))]
    assert found == [first, second] and math.prod(first) == math.prod(second) == shrink.DEVICES


def test_the_fewest_devices_that_a_mesh_allows():
    of = lambda **sizes: shrink.fewest_devices(MeshSettings(**sizes))
    assert of() == 1 and of(data=4) == 4 and of(fsdp=2, tensor=3) == 6
    assert of(data=4, sampling=SamplingMeshSettings(tensor=8)) == 8
    assert of(expert=8, sampling=SamplingMeshSettings(tensor=4)) == 32
    assert of(data=2, fsdp=2, sampling=SamplingMeshSettings(tensor=8)) == 4  # nothing is free: it will be refused


def test_the_sampling_mesh_stays_split():
    mesh = shrink.reduce_mesh(MeshSettings(sampling=SamplingMeshSettings(expert=8, tensor=4)))
    assert (mesh.sampling.expert, mesh.sampling.tensor) == (2, 2)
    assert shrink.reduce_mesh(MeshSettings(sampling=SamplingMeshSettings(tensor=1))).sampling.tensor == 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_narrow_architecture_is_of_the_same_make(name):
    full = PRESETS[name]
    small = shrink.shrink_architecture(full)
    assert shrink.changes(full, small).keys() <= NARROWED
    assert models.count_parameters(dataclasses.replace(small, vocab_size=64)).total < 1_000_000
    assert small.num_heads * full.num_kv_heads == full.num_heads * small.num_kv_heads
    assert small.experts_per_token == full.experts_per_token <= small.num_experts
    assert set(small.attention) == set(full.attention) and set(small.mlp) == set(full.mlp)
    assert small.num_layers >= 2 and small.num_layers % small.period == 0
    # It can be exported as the same family, where the full one can.
    assert families.write_config(small)["architectures"] == families.write_config(full)["architectures"]
    # An even split of what is left of heads and experts.
    kinds = MeshSettings(
        data=1, fsdp=2, expert=2 if "moe" in full.mlp else 1, tensor=1 if small.num_kv_heads % 2 else 2
    )
    count = math.prod(getattr(kinds, axis) for axis in sharding.AXES)
    sharding.check_divisible(
        dataclasses.replace(small, vocab_size=64), sharding.make_mesh(kinds, jax.devices()[:count])
    )


def test_periods_of_kinds_keep_their_order():
    m1 = shrink.shrink_architecture(PRESETS["minimax-m1"])
    assert m1.attention == ("lightning", "lightning", "softmax") and m1.num_layers == 6
    assert m1.rotary_dim * 2 == m1.head_dim and m1.postnorm
    first_dense = dataclasses.replace(PRESETS["qwen3-30b-a3b"], mlp=("dense",) + ("moe",) * 47)
    assert shrink.shrink_architecture(first_dense).mlp == ("dense", "moe", "moe")
    short = dataclasses.replace(PRESETS["minimax-m1"], attention=("lightning",) * 3 + ("softmax",), num_layers=4)
    assert shrink.shrink_architecture(short).num_layers == 3


def test_the_reward_gives_groups_a_signal_and_some_none():
    prompts = [f"What is {n} + 1?" for n in range(40)]
    examples = [{"prompt": prompt} for prompt in prompts for _ in range(4)]
    scores = varied([""] * 160, examples=examples, finish_reasons=[], response_tokens=[])
    groups = [tuple(scores[i : i + 4]) for i in range(0, 160, 4)]
    assert set(groups) == {(0, 1, 0, 1), (0, 0, 0, 0)} and 4 <= groups.count((0, 0, 0, 0)) <= 20


# ---- stand-ins


def test_what_is_here_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = settings(data__source="problems.jsonl", model__tokenizer="characters:012+=")
    found, model, notes = stand_ins.find(config, tmp_path)
    assert model is None and notes == [] and shrink.changes(config, found).keys() == {"data.directory"}


def test_what_is_not_here_is_stood_in_for_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("cispo_jax.data.hub._fetch", _nothing_fetched)
    config = settings(
        model__weights="hf:Qwen/Qwen3-1.7B", model__preset="qwen3-1.7b", data__source="hf:org/sums:train.parquet",
        data__eval_source="gs://bucket/held_out.jsonl", data__answer_field="solution", sft__num_steps=2,
    )  # fmt: skip
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, prompt_field="problem"))
    found, model, notes = stand_ins.find(config, tmp_path)
    assert model.config == PRESETS["qwen3-1.7b"] and found.model.weights == "" and len(notes) == 4
    assert [
        str(value) in note for note, value in zip(notes, ("Qwen3-1.7B", "a byte", "org/sums", "bucket"), strict=True)
    ] == [True] * 4
    rows, held_out = (
        [json.loads(line) for line in Path(path).read_text().splitlines()]
        for path in (found.data.source, found.data.eval_source)
    )
    assert set(rows[0]) == {"problem", "solution", "response"} and not {r["problem"] for r in rows} & {
        r["problem"] for r in held_out
    }
    tokenizer = stand_ins.byte_tokenizer()
    text = tokenizer.render([{"role": "user", "content": "ζ + 1?"}])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "user\nζ + 1?\nassistant\n" and max(ids) < tokenizer.vocab_size == 259


def test_weights_that_are_not_here_need_a_preset(tmp_path, monkeypatch):
    monkeypatch.setattr("cispo_jax.data.hub._fetch", _nothing_fetched)
    config = settings(model__weights="hf:Qwen/Qwen3-1.7B", model__preset="qwen3-1.7")
    with pytest.raises(ConfigError, match=r'architecture must be named.*Did you mean "qwen3-1\.7b"'):
        stand_ins.find(config, tmp_path)


def test_the_small_model_and_files(tmp_path, monkeypatch):
    """Weights that are not here, a file that is: all of it is checked, the shortest rows are trained on, with all their fields."""
    monkeypatch.setattr("cispo_jax.data.hub._fetch", _nothing_fetched)
    rows = [{"prompt": f"{'1+' * (200 - n)}{n}=", "answer": "9", "hint": f"h{n}"} for n in range(200)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(
        model__weights="hf:Qwen/Qwen3-1.7B", model__preset="qwen3-1.7b", data__source=str(tmp_path / "problems.jsonl"),
        data__max_prompt_tokens=60, data__eval_size=20, sampling__prompts_per_step=32,
    )  # fmt: skip
    here = tmp_path / "here"
    whole, model, _ = stand_ins.find(config, here)
    assert whole.data.max_prompt_tokens == 480
    run = building.build(whole, model=model)
    small = shrink.shrink(config)
    found, narrow, full = stand_ins.small_model(run, small, here)
    assert (
        full == PRESETS["qwen3-1.7b"]
        and narrow.vocab_size == 264
        and narrow.qk_norm
        and found.dtype == config.model.dtype
    )
    assert weights.load_config(found.weights) == dataclasses.replace(narrow, file_dtype="float32")
    assert (
        weights.load_tokenizer(found.weights).encode("1+1=") == run.tokenizer.encode("1+1=") and found.tokenizer == ""
    )
    data = stand_ins.small_files(run, small, here)
    kept = [json.loads(line) for line in Path(data.source).read_text().splitlines()]
    assert len(kept) == shrink.PROBLEMS * 5 // 4 and all(
        row["hint"] == f"h{row['prompt'][:-1].split('+')[-1]}" for row in kept
    )
    assert {row["prompt"] for row in rows[160:]} <= {row["prompt"] for row in kept}  # the shortest

    with pytest.raises(ConfigError, match=r"max_prompt_tokens=400"):
        short = dataclasses.replace(config, data=dataclasses.replace(config.data, max_prompt_tokens=50))
        building.build(stand_ins.find(short, tmp_path / "again")[0], model=model)


def test_a_small_preset_is_taken_as_it_is(tmp_path):
    page = importlib.import_module("configs.tiny_moe").get_config()
    page.data.train_size = page.data.eval_size = 20
    config = from_config_dict(page)
    run = building.build(stand_ins.find(config, tmp_path)[0])
    found, narrow, full = stand_ins.small_model(run, config, tmp_path)
    assert found == config.model and narrow == full == dataclasses.replace(PRESETS["tiny-moe"], vocab_size=17)
    large = dataclasses.replace(config, model=dataclasses.replace(config.model, preset="qwen3-30b-a3b"))
    run = building.build(stand_ins.find(large, tmp_path)[0])
    found, narrow, full = stand_ins.small_model(run, large, tmp_path)
    assert found.weights and narrow.embed_dim == 32 and narrow.vocab_size == 17
    assert weights.load_tokenizer(found.tokenizer).encode("1+1") == weights.load_tokenizer(found.weights).encode("1+1")


def _nothing_fetched(name, revision, patterns, kind, spec, setting):
    raise hub.NotFetched(f"{setting}={spec}")


# ---- the command


def run(*arguments, cwd=commands.ROOT):
    return subprocess.run(
        [sys.executable, "-m", "experiments.rehearse", *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )


def test_errors_are_those_of_training(tmp_path):
    debug = "--config=configs/debug.py"
    wrong = {
        "objective": [debug, "--config.objective.name=cisop"],
        "reward": [debug, "--config.rewards.mine=nowhere.py:reward"],
        "template": [debug, "--config.data.template=nowhere.jinja"],
        "preset": [debug, "--config.model.preset=debg"],
        "unknown": [debug, "--config.samplng.group_size=2"],
        "rows": [debug, "--config.objective.micro_batch_tokens=-3"],
        "hub": [debug, "--config.model.weights=hf:Qwen"],
        "data": [debug, "--config.data.source=problems.csv"],
        "no_page": [],
    }
    asked = [
        [f"experiments.{command}", *arguments, f"--workdir={tmp_path / f'{name}_{command}'}"]
        for name, arguments in wrong.items()
        for command in ("train", "rehearse")
    ]
    results = commands.run(*asked)
    for name, training, rehearsal in zip(wrong, results[::2], results[1::2], strict=True):
        assert training[0] == rehearsal[0] == 2, (name, training, rehearsal)
        assert rehearsal[2] == training[2].replace("_train", "_rehearse") and rehearsal[2].startswith("error: "), name


def test_the_mesh_is_checked_at_full_size(tmp_path):
    page = "--config=configs/qwen2p5_32b_dapo_math.py"
    too_many, used = commands.run(
        ["experiments.rehearse", page, "--devices=1024", f"--workdir={tmp_path / 'x'}"],
        ["experiments.rehearse", page, f"--workdir={Path(__file__).parent}"],
    )
    assert too_many[0] == 2 and "are fewer than the 1024 devices" in " ".join(too_many[2].split())
    assert used[0] == 2 and "is not empty" in used[2]


def test_an_error_in_the_middle_of_the_run(tmp_path):
    """A reward that passes its trial and fails on every response of the model: training's own error, 2, and the log is kept."""
    (tmp_path / "strict.py").write_text(
        "def reward(responses, *, examples, **_):\n"
        "    assert responses[0] == examples[0]['answer'], 'not an answer'\n"
        "    return [1.0] * len(responses)\n"
    )
    small = ["--config.evaluation.samples=0", "--config.model.remat=off"]
    done = run(
        "--config=configs/debug.py", f"--config.rewards.strict={tmp_path}/strict.py:reward", f"--workdir={tmp_path / 'here'}", *small
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    message = " ".join(done.stderr.split())
    assert message.startswith("error: ") and "not an answer" in message and "Traceback" not in message
    assert "train FAILED" in " ".join(done.stdout.split()) and "passed" not in done.stdout
    assert "not an answer" in " ".join((tmp_path / "here/logs/train.log").read_text().split())


# In place of `experiments.train`: writes lines of these steps and one checkpoint, and ends so when it is asked to stop.
CHILD = """
import json, pathlib, signal, sys, time
run, steps, saved, code = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
def stop(*_):
    print("error: config.x=1 cannot work")
    sys.exit(code)
signal.signal(signal.SIGTERM, stop)
(run / "checkpoints" / saved).mkdir(parents=True)
(run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\\n" for step in steps))
while True:  # one long sleep would miss a signal that comes just before it
    time.sleep(0.05)
"""
ENDINGS = [
    ([0, 1], 1, 75, None, "after step 1 of 4"),
    ([0, 1, 2], 1, 75, 1, r"checkpoints are of the steps \[1\], metrics.jsonl ends with \[2\]"),
    ([0, 1], 1, 0, 1, "exit code 0, expected 75"),
    ([0, 1], 1, 3, 1, "exit code 3, expected 75"),
    ([0, 1], 1, 2, 2, r"^error: config\.x=1 cannot work$"),
]


@pytest.mark.parametrize(("steps", "saved", "code", "failure", "words"), ENDINGS)
def test_how_training_stops(tmp_path, monkeypatch, steps, saved, code, failure, words):
    life = stages.Life(tmp_path, [], [], shrink.shrink(settings()))

    def start(stage, *_):
        argv = [sys.executable, "-c", CHILD, str(life.run), json.dumps(steps), str(saved), str(code)]
        with (tmp_path / "log").open("w") as log:
            return tmp_path / "log", subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)

    monkeypatch.setattr(life, "_start", start)
    if failure is None:
        assert words in life.train()
        return
    with pytest.raises(stages.Failed, match=words) as caught:
        life.train()
    assert caught.value.code == failure


GOOD = {
    "loss": 1.0,
    "grad/norm": 1.0,
    "policy/entropy": 1.0,
    "policy/rollout_mismatch_max": 0.0,
    "updates": 2,
    "eval/accuracy": 0.5,
}
LINES = [
    (range(5), {}, None),
    ([0, 1, 2, 2, 3, 4], {}, "holds the steps"),
    ([0, 1, 3, 4], {}, "holds the steps"),
    (range(5), {"grad/norm": None}, "grad/norm of step 0"),
    (range(5), {"updates": 0}, "no step had an update"),
    (range(5), {"eval/accuracy": None}, "eval/accuracy of step 4"),
]


@pytest.mark.parametrize(("steps", "changes", "words"), LINES)
def test_what_the_lines_of_a_run_must_hold(tmp_path, monkeypatch, steps, changes, words):
    life = stages.Life(tmp_path, [], [], shrink.shrink(settings()))
    monkeypatch.setattr(life, "_command", lambda *_: "")
    life.run.mkdir()
    text = "".join(json.dumps({"step": step, **GOOD, **changes}) + "\n" for step in steps)
    (life.run / "metrics.jsonl").write_text(text)
    if words is None:
        assert life.resume() == "on mesh data 2 x fsdp 4; 10 updates, every number finite"
    else:
        with pytest.raises(stages.Failed, match=words):
            life.resume()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ["debug.py", "qwen2p5_32b_dapo_math.py:dapo"])
def test_the_whole_life_of_a_page(page, tmp_path):
    """Train, SIGTERM, resume on another mesh, evaluate, export, read back: one with everything here, one with stand-ins."""
    done = run(f"--config=configs/{page}", f"--workdir={tmp_path / 'here'}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if " ok " in line}
    assert list(lines) == ["settings", "train", "resume", "evaluate", "export", "read", "report"]
    assert "exit code 75" in lines["train"] and "passed in" in done.stdout
    assert (tmp_path / "here/run/export/step_000004/config.json").exists()
    assert ("not on this machine" in done.stdout) == ("dapo" in page)
