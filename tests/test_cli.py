"""The command line: every typo is one paragraph on stderr with the setting and the valid values, exit code 2, no traceback.

Every command line runs in a process of its own.
"""

import json
import subprocess
import sys

import commands
import pytest

DEBUG = "--config=configs/debug.py"
BAD = {  # command line after the page -> words that the message must hold
    "misplaced": (["--config.learning_rate=1"], ["config.learning_rate", "config.optimizer.learning_rate"]),
    "typo": (["--config.objective.epsilon_hihg=3"], ["epsilon_hihg", "epsilon_high"]),
    "dash": (["--config.objective.num-epochs=2"], ["num-epochs", "num_epochs"]),
    "section": (["--config.samplng.group_size=4"], ["samplng", "sampling"]),
    "below_a_value": (["--config.num_steps.x=4"], ["num_steps"]),
    "wrong_type": (["--config.num_steps=abc"], ["config.num_steps", "abc"]),
    "wrong_bool": (["--config.objective.packing=maybe"], ["config.objective.packing", "maybe"]),
    "remat": (["--config.model.remat=True"], ["config.model.remat='True'", "full, attention, off"]),
    "float_for_int": (["--config.sampling.group_size=2.5"], ["config.sampling.group_size", "2.5"]),
    "whole_section": (["--config.sampling=3"], ["config.sampling", "3"]),
    "G=1": (["--config.sampling.group_size=1"], ["config.sampling.group_size=1", "at least 2"]),
    "G=0": (["--config.sampling.group_size", "0"], ["config.sampling.group_size=0", "at least 2"]),
    "minibatches": (["--config.sampling.prompts_per_step=6"], ["prompts_per_step=6", "num_minibatches=4", "1, 2, 3, 6"]),
    "T=0": (["--config.sampling.temperature=0"], ["config.sampling.temperature=0", "above 0"]),
    "no_tokens": (["--config.sampling.max_new_tokens=0"], ["config.sampling.max_new_tokens=0", "at least 1"]),
    "top_p": (["--config.sampling.top_p=0.9"], ["config.sampling.top_p=0.9", "config.evaluation.top_p"]),
    "epsilon": (["--config.objective.epsilon_high=0"], ["config.objective.epsilon_high=0", "above 0"]),
    "loss": (["--config.objective.name=cisop"], ["config.objective.name='cisop'", '"cispo"', "gspo", "module_or_file:function"]),
    "loss_file": (["--config.objective.name=nowhere.py:loss"], ["config.objective.name", "nowhere.py"]),
    "bound_of_another": (["--config.objective.name=reinforce", "--config.objective.epsilon_high=3"], ["epsilon_high", "reinforce"]),
    "preset": (["--config.model.preset=debg"], ["config.model.preset='debg'", '"debug"', "tiny"]),
    "no_tokenizer": (["--config.model.tokenizer="], ["config.model.tokenizer", "characters:"]),
    "mesh": (["--config.mesh.data=3"], ["mesh.data=3", "1 device"]),
    "mesh_zero": (["--config.mesh.fsdp=0"], ["mesh.fsdp=0"]),
    "option": (["--config.data.options.max_valu=9"], ["config.data.options.max_valu", "max_value"]),
    "option_type": (["--config.data.options.max_value=nine"], ["config.data.options.max_value", "nine"]),
    "source": (["--config.data.source=arithmetics"], ["config.data.source", "arithmetic"]),
    "missing_file": (["--config.data.source=nothing.jsonl"], ["config.data.source", "nothing.jsonl"]),
    "long_prompt": (["--config.data.max_prompt_tokens=3"], ["config.data.max_prompt_tokens=3", "filter"]),
    "reward_without_colon": (["--config.rewards.mine=abc"], ["config.rewards.mine", "module_or_file:function"]),
    "reward_file": (["--config.rewards.mine=nowhere.py:reward"], ["config.rewards.mine", "nowhere.py"]),
    "reward_typo": (["--config.rewards.wokers=2"], ["config.rewards.wokers", '"workers"']),
    "reward_value_missing": (["--config.rewards.mine"], ["config.rewards.mine"]),
    "argument": (["num_steps=3"], ["num_steps=3", "--config.section.key=value"]),
    "flag": (["--wrkdir=x"], ["wrkdir", "workdir"]),
    "weights": (["--config.model.weights=/nowhere/model.gguf"], ["config.model.weights", "/nowhere/model.gguf"]),
    "tokens": (["--config.objective.micro_batch_tokens=-3"], ["config.objective.micro_batch_tokens=-3", "at least 0"]),
    "seed": (["--config.seed=-1"], ["config.seed=-1"]),
    "seed_size": (["--config.seed=99999999999999999999"], ["config.seed=99999999999999999999", "2**63"]),
    "infinite": (["--config.optimizer.weight_decay=inf"], ["config.optimizer.weight_decay=inf"]),
    "temperature_zero_in_float32": (["--config.sampling.temperature=1e-300"], ["config.sampling.temperature=1e-300"]),
    "workers": (["--config.rewards.workers=100000000000"], ["config.rewards.workers", "1024"]),
    "noresume_value": (["--noresume=1"], ["resume"]),
    "exits": (["--config.objective.name={pages}/exits.py:loss"], ["config.objective.name", "SystemExit"]),
    "branch": (["--config.objective.name={pages}/branch.py:loss"], ["config.objective.name", "inside jax.jit"]),
    "broadcast": (["--config.objective.name={pages}/broadcast.py:loss"], ["config.objective.name", "signature"]),
    "nan": (["--config.objective.name={pages}/nan.py:loss"], ["config.objective.name", "nan"]),
    "template_filter": (["--config.data.template={pages}/filter.jinja"], ["config.data.template", "nosuch"]),
    "template_field": (["--config.data.template={pages}/field.jinja"], ["config.data.template", "the same"]),
    "workdir_below_a_file": (["--workdir={pages}/empty.py/x"], ["--workdir", "empty.py"]),
    "coordinator_alone": (["--coordinator=localhost:1234"], ["--coordinator=localhost:1234", "--num_processes, --process_id"]),
    "process_id": (["--coordinator=localhost:1234", "--num_processes=2", "--process_id=2"], ["--process_id=2", "0 to 1"]),
    "sft": (["--config.sft.num_steps=2", "--config.sampling.max_new_tokens=2"], ["config.sampling.max_new_tokens=2"]),
}  # fmt: skip
PAGES = {
    "no_page": (["--workdir=x"], ["--config=PAGE", "configs/"]),
    "missing_page": (["--config=configs/nothing.py", "--workdir=x"], ["configs/nothing.py"]),
    "page_syntax": (["--config={pages}/syntax.py", "--workdir=x"], ["syntax.py", "line 2"]),
    "page_unknown_section": (["--config={pages}/section.py", "--workdir=x"], ["optimiser", "optimizer"]),
    "page_unknown_key": (["--config={pages}/key.py", "--workdir=x"], ["config.optimizer.lr", "learning_rate"]),
    "page_type": (["--config={pages}/type.py", "--workdir=x"], ["num_steps"]),
    "page_name_error": (["--config={pages}/name.py", "--workdir=x"], ["name.py", "undefined_thing"]),
    "page_import_error": (["--config={pages}/imports.py", "--workdir=x"], ["imports.py", "no_such_module"]),
    "page_without_config": (["--config={pages}/empty.py", "--workdir=x"], ["empty.py", "get_config"]),
    "page_of_nothing": (["--config={pages}/none.py", "--workdir=x"], ["none.py"]),
    "page_is_a_directory": (["--config=configs", "--workdir=x"], ["configs"]),
    "no_workdir": ([DEBUG], ["--workdir=DIR"]),
    "workdir_is_a_file": ([DEBUG, "--workdir={pages}/empty.py"], ["--workdir", "empty.py"]),
    "noresume": ([DEBUG, "--workdir={pages}", "--noresume"], ["--noresume", "not empty"]),
}
HEAD = "from cispo_jax.config import default_config\n\ndef get_config():\n    config = default_config()\n"
LOSS = (
    "def loss(log_probs, old, advantages, mask, *, aggregation):\n    {}\n    return -(aggregation * {}).sum(), {{}}\n"
)
SOURCES = {
    "syntax.py": "def get_config():\n    return = 3\n",
    "section.py": HEAD + "    config.optimiser.learning_rate = 1.0\n    return config\n",
    "key.py": HEAD + "    config.optimizer.lr = 1.0\n    return config\n",
    "type.py": HEAD + "    config.num_steps = 'many'\n    return config\n",
    "name.py": HEAD + "    config.num_steps = undefined_thing\n    return config\n",
    "imports.py": "import no_such_module\n",
    "empty.py": "",
    "none.py": "def get_config():\n    return None\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "branch.py": LOSS.format(
        "if (log_probs - old).sum() > 0: advantages = -advantages", "advantages[:, None] * log_probs"
    ),
    "broadcast.py": LOSS.format("", "advantages * log_probs"),  # [B] x [B, T]
    "nan.py": LOSS.format("", "float('nan') * log_probs"),
    "filter.jinja": "{{ prompt|nosuch }}",
    "field.jinja": "{{ example.promt }}1=",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    pages = tmp_path_factory.mktemp("pages")
    for name, source in SOURCES.items():
        (pages / name).write_text(source)
    workdir, directory = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("sets")
    common = [DEBUG, f"--config.data.directory={directory}"]
    lines = {
        name: [*common, f"--workdir={workdir}/{name}", *(arg.replace("{pages}", str(pages)) for arg in argv)]
        for name, (argv, _) in BAD.items()
    }
    lines |= {name: [arg.format(pages=pages) for arg in argv] for name, (argv, _) in PAGES.items()}
    done = commands.run(*(["experiments.train", *argv] for argv in lines.values()))
    return dict(zip(lines, done, strict=True)), workdir


@pytest.mark.parametrize("name", BAD | PAGES)
def test_user_errors_are_one_paragraph_and_exit_2(results, name):
    code, out, err = results[0][name]
    _, words = (BAD | PAGES)[name]
    assert "Traceback" not in err + out and code == 2, (code, out, err)
    paragraphs = [p for p in err.strip().split("\n\n") if p]
    assert len(paragraphs) == 1 and err.startswith("error: "), err
    flat = " ".join(err.split())
    assert all(word in flat for word in words), err
    assert max(map(len, err.splitlines())) <= 200


def test_nothing_was_started(results):
    assert list(results[1].iterdir()) == []


def parse(*argv):
    """The settings that a command line gives, from a process of its own."""
    code = (
        "import json, sys; from experiments import cli; from cispo_jax.config import to_dict\n"
        "cli.define_flags(); print(json.dumps(to_dict(cli.parse(['train', *sys.argv[1:]])))); assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=commands.ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_good_command_lines_reach_the_settings_without_loading_jax():
    found = parse(
        DEBUG, "--workdir", "x", "--config.num_steps", "7", "--config.sampling.temperature=1", "--config.objective.epsilon_high=5",
        "--config.objective.aggregation=prompt", "--config.rewards.short=my_reward.py:short", "--config.rewards.long", "m:f",
        "--config.rewards.workers=2", "--config.data.options.operations=+", "--config.data.options.max_value=30",
        "--config.data.template_kwargs.enable_thinking=False", "--config.data.template_kwargs.note=a b=c",
        "--config.objective.packing=false",
    )  # fmt: skip
    assert (
        found["num_steps"] == 7
        and found["sampling"]["temperature"] == 1.0
        and found["objective"]["epsilon_high"] == 5.0
    )
    assert found["objective"]["aggregation"] == "prompt" and found["objective"]["packing"] is False
    assert found["rewards"]["short"] == "my_reward.py:short" and found["rewards"]["long"] == "m:f"
    assert found["rewards"]["workers"] == 2
    assert found["data"]["options"] == {"wording": "{expression}=", "min_value": 0, "operations": "+", "max_value": 30}
    assert found["data"]["template_kwargs"] == {"enable_thinking": False, "note": "a b=c"}


def test_help_is_quick_and_shows_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--help"], capture_output=True, text=True, cwd=commands.ROOT
    )
    assert done.returncode == 0
    assert "python -m experiments.train --config=configs/quickstart.py" in done.stdout
    assert "--workdir" in done.stdout and "--[no]resume" in done.stdout
