"""The plan on fake CPU devices: formulas against the compiler's counts, collectives of loops, refusals, the command and its exit codes."""

import dataclasses
import functools
import json

import commands
import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import models, sharding
from cispo_jax.config import ConfigError
from cispo_jax.log_probs import fused_token_log_probs
from cispo_jax.models import TransformerConfig
from experiments.plan import chips, compiling, flops, hlo, planning, report

# Wide enough that matrix products are nearly all there is to count; one layer is unrolled by the compiler.
WIDE = TransformerConfig(256, 128, 1, 4, 2, 32, 384, tied_head=False)


def counted(function, *arguments):
    """FLOPs by the compiler."""
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


def abstract(config):
    return jax.eval_shape(lambda: models.Transformer(config, key=jax.random.key(0)))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_formula_of_a_forward_pass_is_the_compilers_count(layers):
    """Of one layer, and of two with the second counted as much as the first (the compiler counts a loop's body once)."""
    config = dataclasses.replace(WIDE, num_layers=layers)
    B, T = 2, 32
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    states = counted(lambda m, x: models.hidden_states(m, x).hidden_BTD, abstract(WIDE), tokens)
    assert flops.layers(config, B * T, B * flops.scores(T)) == pytest.approx(layers * states, rel=0.05)
    whole = counted(models.forward, abstract(WIDE), tokens)
    assert flops.head(config, B * T) == pytest.approx(whole - states, rel=0.05)


@pytest.mark.parametrize("remat", ["off", "full"])
def test_the_formula_of_an_update_is_the_compilers_count(remat):
    B, X, Y = 4, 49, 33

    def loss(model, tokens, source, targets):
        hidden = models.hidden_states(model, tokens, remat=remat).hidden_BTD
        hidden = jax.vmap(lambda hidden_XD, source_Y: hidden_XD[source_Y])(hidden, source)
        log_probs, _ = fused_token_log_probs(hidden, models.head_matrix(model), targets, chunk_size=B * Y)
        return jnp.sum(log_probs)

    shapes = (jax.ShapeDtypeStruct((B, width), jnp.int32) for width in (X, Y, Y))
    compiled = counted(jax.grad(loss), abstract(WIDE), *shapes)
    formula = flops.train_step(WIDE, rows=B, columns=X, targets=Y, remat=remat)
    # Of the pass that is done again the compiler drops the last product, whose result nobody reads.
    assert formula == pytest.approx(compiled, rel=0.05 if remat == "off" else 0.1)


def test_attention_skips_what_causality_rules_out(monkeypatch):
    monkeypatch.setattr(flops, "BLOCK", 8)
    monkeypatch.setattr(flops, "LEAST_PART", 2)
    assert [flops.scores(T) for T in (1, 2, 3, 8)] == [1, 4, 2 * 2 + 1 * 3, 2 * (2 + 4 + 6 + 8)]
    assert [flops.scores(T) for T in (9, 64)] == [3 * 64, 36 * 64]


def test_experts_and_lightning_are_counted_by_what_a_token_meets():
    moe = dataclasses.replace(WIDE, mlp=("moe",), num_experts=8, experts_per_token=2, expert_dim=64)
    T = 64
    assert flops.layer(moe, 0, T, 0) - flops.layer(WIDE, 0, T, 0) == 6 * T * 128 * (2 * 64 - 384) + 2 * T * 128 * 8
    lightning = dataclasses.replace(WIDE, attention=("lightning",), lightning_block=T)
    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
    states = counted(lambda m, x: models.hidden_states(m, x).hidden_BTD, abstract(lightning), tokens)
    assert flops.layers(lightning, T, 0) == pytest.approx(states, rel=0.1)


# ---- collectives


def settings(**changes):
    changes = {"mesh__fsdp": -1, "objective__num_minibatches": 1, "sampling__prompts_per_step": 4} | changes
    return debug_run.config(**changes)


@functools.cache
def lowered(layers, mesh=(("data", 1), ("fsdp", 2), ("tensor", 2))):
    config = settings(**{f"mesh__{axis}": size for axis, size in mesh})
    architecture = TransformerConfig(32, 32, layers, 4, 2, 8, 64)
    return compiling.Lowered(config, architecture, sharding.make_mesh(config.mesh, jax.devices()[:4]))


@functools.cache
def compiled(layers, name="train_step"):
    of = lowered(layers)
    mesh = of.programs.mesh if name in ("train_step", "reshard") else of.programs.sampling_mesh
    return compiling.compile_program(getattr(of, name)(), mesh)


def test_twice_the_layers_move_twice_as_much():
    """What layers add: from 2 to 4 half of what it is from 4 to 8; for bytes along both axes and for FLOPs."""
    two, four, eight = (compiled(n).program.bytes_by_axis() for n in (2, 4, 8))
    assert set(two) >= {"fsdp", "tensor"}
    for axis in ("fsdp", "tensor"):
        assert eight[axis] - four[axis] == pytest.approx(2 * (four[axis] - two[axis]), rel=1e-6)
        assert four[axis] - two[axis] > 0.25 * four[axis]
    count = lambda n: flops.train_step(
        dataclasses.replace(WIDE, num_layers=n), rows=4, columns=36, targets=32, remat="full"
    )
    assert count(8) - count(4) == 2 * (count(4) - count(2)) > 0


def test_fsdp_gathers_every_weight_and_adds_up_every_gradient():
    """Of the parameters split over fsdp (n = 2), half is received for each gather; at least forward and backward, then the gradient."""
    model = lowered(8).state.model
    split = sum(x.size * 4 // 2 for x in jax.tree.leaves(model) if "fsdp" in x.sharding.spec)  # / tensor
    assert compiled(8).program.bytes_by_axis()["fsdp"] >= 3 * split / 2


def test_the_rows_of_a_micro_batch_are_spread_before_they_are_embedded():
    """A group at a time, whose rows lie on two of the four devices: each embeds its own rows, and no embeddings are exchanged."""
    small = {"sampling__prompts_per_step": 2, "sampling__group_size": 8, "sampling__max_new_tokens": 24}
    config = settings(objective__micro_batch_tokens=1, **small)
    of = compiling.Lowered(config, WIDE, sharding.make_mesh(config.mesh, jax.devices()[:4]))
    program = compiling.compile_program(of.train_step(), of.programs.mesh).program
    assert not [c for c, _ in program.walk() if c.kind == "all-gather" and c.shape[-2:] == (23, WIDE.embed_dim)]


def test_groups_are_read_in_every_form():
    program = hlo.Program("", {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2})
    for text, axes in (
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", "fsdp"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "data"),
        ("replica_groups=[2,4]<=[8]", "fsdp+tensor"),
        ("replica_groups=[1,8]<=[8]", "data+fsdp+tensor"),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'expert'=1,'tensor'=2] {'fsdp'}", "fsdp"),
        ("replica_groups=mesh['a'=8] {'a'}", "data+fsdp+tensor"),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", "fsdp"),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", "data+tensor"),
    ):
        assert program._axes(np.array(program._groups(text))) == axes, text


def test_bytes_are_those_that_leave_a_device():
    program = hlo.Program("", {"data": 1, "fsdp": 4, "expert": 1, "tensor": 1})
    groups = "channel_id=1, replica_groups=[1,4]<=[4]"
    sent = lambda kind, result: program._collective(kind.removesuffix("-start"), kind, "x", result, groups).sent
    assert sent("all-gather", "bf16[8,16]{1,0}") == 256 * 3 / 4
    assert sent("all-gather-start", "(bf16[2,16]{1,0}, bf16[8,16]{1,0})") == 256 * 3 / 4
    assert sent("all-reduce", "(f32[16]{0}, f32[8]{0})") == 96 * 2 * 3 / 4
    assert sent("reduce-scatter", "f32[4]{0}") == 16 * 3
    assert sent("all-to-all", "f32[8,2]{1,0}") == 64 * 3 / 4


def test_the_token_loop_is_found_and_moves_no_weight():
    program = compiled(2, "decode").program
    assert program.token_loop is not None
    per_token = program.bytes_by_axis(program.token_loop)
    assert set(per_token) <= {"tensor", "data", "data+tensor"} and per_token["tensor"] > 0
    assert not program.moved_weights(32 * 8, 16)


def test_a_decode_loop_that_moves_weights_is_refused():
    """The training layout in place of the sampling layout: every token gathers the layers."""
    of = lowered(2, mesh=(("data", 1), ("fsdp", 4), ("tensor", 1)))
    model, mesh = of.state.model, of.programs.mesh
    of_training = lambda: model
    wrong = dataclasses.replace(of.programs, sampling_mesh=mesh)
    of = compiling.Lowered.__new__(compiling.Lowered)
    of.__dict__ |= lowered(2, mesh=(("data", 1), ("fsdp", 4), ("tensor", 1))).__dict__ | {"programs": wrong}
    of.sampler = of_training
    found = compiling.compile_program(of.decode(), mesh)
    architecture = model.config
    with pytest.raises(ConfigError, match=r"moves weights .* config\.mesh\.sampling\.tensor"):
        planning._refuse_moved_weights(found, architecture, of.sizes, of.config)


# ---- memory


def test_temporaries_of_the_train_step_grow_linearly_with_the_length():
    def temporary(T):
        one = {"mesh__data": 1, "mesh__fsdp": 1, "objective__micro_batch_tokens": 1}  # a row at a time
        config = settings(sampling__max_new_tokens=T, model__remat="full", **one)
        of = compiling.Lowered(config, debug_run.TINY, sharding.make_mesh(config.mesh, jax.devices()[:1]))
        return compiling.compile_program(of.train_step(), of.programs.mesh).temp_bytes

    short, long, longer = map(temporary, (2048, 4096, 8192))
    assert longer - long < 2.2 * (long - short)


def test_a_refusal_of_the_tpu_compiler_is_read():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 103.45G of 95.74G hbm. "
        "Exceeded hbm capacity by 7.71G."
    )
    needed, available = compiling.refused(message)
    assert (needed / 2**30, available / 2**30) == pytest.approx((103.45, 95.74))
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (23.74G) "
        "exceeds available HBM (15.75G). HLO module: jit_train_step."
    )
    needed, available = compiling.refused(message)
    assert (needed / 2**30, available / 2**30) == pytest.approx((23.74, 15.75))
    assert compiling.refused("INVALID_ARGUMENT: something else") is None


# ---- topologies


def test_names_of_accelerator_types_count_tensorcores():
    with pytest.raises(ConfigError, match=r"v5p-256 is an accelerator type of 128 chips.*v5p:4x4x8"):
        chips.find("v5p-256")
    with pytest.raises(ConfigError, match=r"v5litepod-16 is .* of 16 chips.*v5e:4x4"):
        chips.find("v5litepod-16")
    assert chips.shape("v5p", 512) == "8x8x8" and chips.shape("v6e", 32) == "4x8"
    for name in ("h100:8", "v5p", "cpu", "v5p:4x4x", "cpu:0"):
        with pytest.raises(ConfigError, match="--topology"):
            chips.find(name)
    with pytest.raises(ConfigError, match="--hbm_gib"):
        chips.find("gpu:8")


# ---- the command


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    page = ["--config=configs/debug.py", "--config.objective.num_minibatches=1", f"--json={tmp_path}/plan.json"]
    small, none, typo, rows = commands.run(
        ["experiments.plan", *page, "--topology=cpu:2"],
        ["experiments.plan", *page[:2], "--topology=gpu:8", "--hbm_gib=0.00001"],
        ["experiments.plan", *page[:2], "--topology=tpu:8"],
        ["experiments.plan", *page[:2], "--topology=cpu:2", "--config.mesh.tensor=8"],
    )
    assert small[0] == 0, small[2]
    assert "train_step" in small[1] and "decode slots that fit" in small[1]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] and not plan["estimate"]
    for name in ("train_step", "reshard", "prefill", "decode"):
        entry = plan[name]
        assert entry["fits"] and entry["hbm_bytes"] == 16 * 2**30
        assert entry["needed_bytes"] == entry["peak_bytes"] + entry["resident_bytes"]
        assert {"argument_bytes", "output_bytes", "temp_bytes", "flops", "collective_bytes", "roofline"} <= set(entry)
    assert set(plan["train_step"]["collective_bytes"]) == {"fsdp"}
    assert none[0] == 3 and "ESTIMATE" in none[1] and "GiB per device are missing" in none[1]
    assert typo[0] == 2 and "--topology=tpu:8" in typo[2]
    assert rows[0] == 2 and "mesh.tensor=8" in rows[2]


def test_what_does_not_fit_comes_with_settings_that_do():
    """By arithmetic: the micro-batches are made smaller until it fits."""
    small = dataclasses.replace(chips.GPU, hbm_bytes=200e6)
    topology = chips.Topology("gpu:4", "gpu", jax.devices()[:4], 4, 4, 1, small, "")
    changed = dict(
        model__preset="tiny", sampling__max_new_tokens=2000, sampling__prompts_per_step=16, model__remat="full"
    )
    found = planning.plan(settings(**changed), topology)
    assert not found["fits"] and found["missing_bytes"] > 0 and "does not fit" in report.table(found)
    assert "--config.objective.micro_batch_tokens=" in report.table(found)
    changes = {name.removeprefix("config.").replace(".", "__"): value for name, value in found["suggestion"].items()}
    assert planning.plan(settings(**changed | changes), topology)["fits"]
