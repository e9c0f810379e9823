"""The plan against the TPU compiler, without a TPU: `make test-plan`, whose environment has libtpu."""

import dataclasses
import json
import math
import subprocess
import sys

import commands
import debug_run
import pytest

from cispo_jax import sharding
from cispo_jax.config import ConfigError
from cispo_jax.models import PRESETS
from experiments.plan import chips, compiling, planning

pytestmark = [pytest.mark.tpu, pytest.mark.timeout(1200)]

SMALL = ["--config=configs/debug.py", "--config.objective.num_minibatches=1", "--config.model.dtype=bfloat16"]


def plan(tmp_path, *arguments):
    """Exit code, table and JSON of the command."""
    file = tmp_path / "plan.json"
    file.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plan", f"--json={file}", *SMALL, *arguments],
        cwd=commands.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text()) if file.exists() else {}


def test_every_program_compiles_for_a_torus(tmp_path):
    code, text, found = plan(
        tmp_path, "--topology=v5p:2x2x2", "--config.mesh.tensor=2", "--config.mesh.sampling.tensor=2"
    )
    assert code == 0, text
    assert "v5p:2x2x2 (v5p-16): 8 chips on 2 host(s)" in text
    assert found["topology"]["hbm_bytes"] == 95 * 2**30
    assert set(found["train_step"]["collective_bytes"]) >= {"fsdp", "tensor"}
    assert set(found["decode"]["collective_bytes"]) <= {"tensor", "data", "data+tensor"}


def test_slices_split_the_rows(tmp_path):
    code, text, found = plan(
        tmp_path, "--topology=v5e:2x2", "--slices=2", "--config.mesh.data=2", "--programs=train_step"
    )
    assert code == 0, text
    assert found["mesh"] == {"data": 2, "fsdp": 4, "expert": 1, "tensor": 1} and found["topology"]["chips"] == 8


def test_temporaries_grow_linearly_with_the_length(tmp_path):
    def temporary(T):
        options = [
            "--topology=v5e:2x2",
            "--programs=train_step",
            "--config.model.remat=full",
            "--config.model.preset=tiny",
        ]
        code, text, found = plan(tmp_path, *options, f"--config.sampling.max_new_tokens={T}")
        assert code == 0, text
        return found["train_step"]["temp_bytes"]

    short, long, longer = map(temporary, (16384, 32768, 65536))  # a chip's fast memory takes the first 100 MB
    assert longer - long < 2.3 * (long - short)


def test_what_does_not_fit_says_by_how_much(tmp_path):
    options = [
        "--topology=v5e:2x2",
        "--programs=train_step",
        "--config.model.preset=small",
        "--config.model.remat=off",
    ]
    code, text, found = plan(tmp_path, *options, "--config.sampling.max_new_tokens=200000")
    assert code == 3, text
    assert found["train_step"]["peak_bytes"] is None and not found["fits"]
    assert found["missing_bytes"] == found["train_step"]["needed_bytes"] - found["train_step"]["hbm_bytes"] > 0
    assert "GiB per device are missing" in text


def test_a_shape_that_is_no_slice_is_refused(tmp_path):
    code, text, _ = plan(tmp_path, "--topology=v5p:3x5x7")
    assert code == 2 and "--topology=v5p:3x5x7" in text and "Traceback" not in text


def lowered(preset="tiny-moe", **changes):
    """Programs of the debug page for eight chips, in this process."""
    chips.prepare_environment()
    changes = {"mesh__fsdp": -1, "objective__num_minibatches": 1, "model__dtype": "bfloat16"} | changes
    config = debug_run.config(**changes)
    mesh = sharding.make_mesh(config.mesh, chips.find("v5p:2x2x2").devices)
    return compiling.Lowered(config, PRESETS[preset], mesh)


def test_devices_send_experts_the_tokens_of_their_rows_alone():
    of = lowered(mesh__expert=4, sampling__max_new_tokens=512)
    program = compiling.compile_program(of.train_step(), of.programs.mesh).program
    along = [c for c, _ in program.walk() if "expert" in c.axes.split("+")]
    assert "ragged-all-to-all" in {c.kind for c in along}
    tokens = (
        4 * of.sizes.rows // 8 * of.sizes.response * PRESETS["tiny-moe"].embed_dim
    )  # of the four devices that share experts
    assert tokens > 4 * max(math.prod(c.shape) for c in along if c.kind == "all-gather")


def test_decoding_a_mixture_moves_no_weights(tmp_path):
    mesh = ["--config.mesh.expert=4", "--config.mesh.sampling.tensor=2"]
    options = ["--topology=v5p:2x2x2", "--programs=decode", "--config.model.preset=tiny-moe"]
    code, text, found = plan(tmp_path, *options, *mesh)
    assert code == 0, text
    assert found["decode"]["collectives"]["ragged-all-to-all expert"] > 0


def test_a_decode_loop_that_gathers_weights_is_refused():
    """The layout of training: every token gathers the layers."""
    of = lowered(mesh__expert=4)
    of.programs = dataclasses.replace(of.programs, sampling_mesh=of.programs.mesh)
    of.sampler = lambda: of.state.model
    found = compiling.compile_program(of.decode(), of.programs.mesh)
    with pytest.raises(ConfigError, match=r"moves weights .* config\.mesh\.sampling\.tensor"):
        planning._refuse_moved_weights(found, of.state.model.config, of.sizes, of.config)
