"""Meshes from settings, the rule table, and shardings of state and sampling layout."""

import dataclasses

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cispo_jax import sharding
from cispo_jax.config import ConfigError, MeshSettings, SamplingMeshSettings
from cispo_jax.models import PRESETS, Transformer
from cispo_jax.training.optimizer import make_optimizer
from cispo_jax.training.train_step import init_state

BOTH = ("fsdp", "expert")


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        (dict(), (1, 4, 1, 1)),
        (dict(data=2), (2, 2, 1, 1)),
        (dict(data=-1, fsdp=1), (4, 1, 1, 1)),
        (dict(fsdp=2, tensor=2), (1, 2, 1, 2)),
        (dict(fsdp=1, tensor=-1), (1, 1, 1, 4)),
        (dict(fsdp=1, expert=-1, tensor=2), (1, 1, 2, 2)),
    ],
)
def test_sizes(settings, shape):
    mesh = sharding.make_mesh(MeshSettings(**settings), jax.devices()[:4])
    assert mesh.axis_names == ("data", "fsdp", "expert", "tensor")
    assert tuple(mesh.shape.values()) == shape
    assert sharding.batch_devices(mesh) == 4 // shape[3]


@pytest.mark.parametrize(
    "settings",
    [
        dict(data=3),
        dict(data=3, fsdp=1),
        dict(data=-1),
        dict(fsdp=0),
        dict(fsdp=-2),
        dict(fsdp=2),
        dict(fsdp=8),
        dict(tensor=8),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings):
    with pytest.raises(ConfigError) as error:
        sharding.make_mesh(MeshSettings(**settings), jax.devices()[:4])
    for name, value in settings.items():
        assert f"mesh.{name}={value}" in str(error.value)


def test_every_logical_axis_of_the_model_has_a_rule():
    import dataclasses

    config = dataclasses.replace(debug_run.FAMILIES["minimax"], qkv_bias=True, qk_norm=True)
    abstract = jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0)))
    names = {
        name
        for leaf in jax.tree.leaves(abstract, is_leaf=lambda x: hasattr(x, "out_sharding"))
        for name in leaf.out_sharding
        if name
    }
    assert names <= {logical for logical, _ in sharding.RULES} and len(names) == 9
    assert {axis for _, axes in sharding.RULES for axis in np.atleast_1d(axes)} <= {None, *sharding.AXES}


def specs(tree):
    return {jax.tree_util.keystr(path): x.spec for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def find(found, *words):
    (spec,) = [spec for name, spec in found.items() if all(word in name for word in words)]
    return tuple(spec) + (None,) * (4 - len(tuple(spec)))


def test_state_and_moments_share_their_shardings():
    optimizer = make_optimizer(debug_run.config().optimizer)
    abstract = jax.eval_shape(lambda: init_state(Transformer(debug_run.TINY, key=jax.random.key(0)), optimizer))
    found = specs(sharding.state_shardings(abstract, debug_run.mesh(fsdp=2, tensor=2)))
    for place in (".model", ".mu", ".nu"):
        assert find(found, place, "embedding")[:2] == ("tensor", BOTH)
        assert find(found, place, "gate") == (None, BOTH, "tensor", None)
        assert find(found, place, "query'" if "query'" in "".join(found) else "query") == (None, BOTH, "tensor", None)
        assert find(found, place, "down") == (None, "tensor", BOTH, None)
        assert find(found, place, "final_norm") == (None,) * 4


def test_experts_are_split_over_the_expert_axis():
    abstract = jax.eval_shape(lambda: Transformer(debug_run.FAMILIES["mixtral"], key=jax.random.key(0)))
    found = specs(sharding.state_shardings(abstract, debug_run.mesh(expert=2, tensor=2)))
    assert find(found, "mlp", "gate") == find(found, "mlp", "up") == (None, "expert", "fsdp", "tensor")
    assert find(found, "mlp", "down") == (None, "expert", "tensor", "fsdp")
    assert find(found, "router") == (None, BOTH, None, None)


@pytest.mark.parametrize("preset", ["tiny-moe", "qwen3-1.7b", "qwen3-30b-a3b", "minimax-m1"])
@pytest.mark.parametrize("sizes", [(1, 8, 1, 1), (1, 2, 2, 2)])
def test_a_device_holds_its_share_of_parameters_and_moments(preset, sizes):
    """Whatever the architecture, and whichever axes the devices are on: 1 / 8 of the bytes, less than 1.1 with what is not split."""
    optimizer = make_optimizer(debug_run.config().optimizer)
    abstract = jax.eval_shape(lambda: init_state(Transformer(PRESETS[preset], key=jax.random.key(0)), optimizer))
    mesh = sharding.make_mesh(MeshSettings(*sizes), jax.devices())
    size = lambda shape, x: int(np.prod(shape)) * x.dtype.itemsize
    total = sum(size(x.shape, x) for x in jax.tree.leaves(abstract))
    shard = jax.tree.map(
        lambda x, to: size(to.shard_shape(x.shape), x), abstract, sharding.state_shardings(abstract, mesh)
    )
    assert total / 8 <= sum(jax.tree.leaves(shard)) <= 1.1 * total / 8


def test_sampling_splits_nothing_that_every_token_meets_over_the_experts():
    abstract = jax.eval_shape(lambda: Transformer(debug_run.FAMILIES["mixtral"], key=jax.random.key(0)))
    mesh = sharding.sampling_mesh(debug_run.mesh(fsdp=2, expert=2))
    found = specs(sharding.state_shardings(abstract, mesh, sharding.SAMPLING_RULES))
    assert find(found, "query") == (None, None, "tensor", None) and find(found, "embedding")[:2] == ("tensor", None)
    assert find(found, "mlp", "gate") == (None, "expert", "fsdp", "tensor")


def test_the_sampling_layout_replicates_over_data_and_fsdp():
    abstract = jax.eval_shape(lambda: Transformer(debug_run.TINY, key=jax.random.key(0)))
    mesh = sharding.sampling_mesh(debug_run.mesh(data=1, fsdp=2, tensor=2))
    assert dict(mesh.shape) == dict(data=2, fsdp=1, expert=1, tensor=2)
    shape = abstract.layers[0].mlp.gate.shape
    (layout,) = jax.tree.leaves(sharding.state_shardings(abstract, mesh).layers[0].mlp.gate)
    assert layout.shard_shape(shape) == (*shape[:2], shape[2] // 2)


@pytest.mark.parametrize(
    "sizes, shape", [(dict(tensor=4), (1, 1, 1, 4)), (dict(expert=2, tensor=1), (2, 1, 2, 1)), ({}, (2, 1, 1, 2))]
)
def test_sampling_may_split_the_same_devices_otherwise(sizes, shape):
    mesh = debug_run.mesh(fsdp=2, tensor=2)
    sampling = sharding.sampling_mesh(mesh, SamplingMeshSettings(**sizes))
    assert tuple(sampling.shape.values()) == shape
    assert list(sampling.devices.flat) == list(mesh.devices.flat)


def test_a_sampling_mesh_that_does_not_divide_names_its_settings():
    with pytest.raises(ConfigError, match=r"config.mesh.sampling.tensor=3 does not divide the 4 devices"):
        sharding.sampling_mesh(debug_run.mesh(fsdp=4), SamplingMeshSettings(tensor=3))


def test_decoding_moves_no_weight_between_devices():
    """The compiled decode loop in the sampling layout: no collective as large as a weight matrix inside."""
    import re

    from cispo_jax.sampling import decode, draw

    # 128 rows of 32: moving a weight [32, 64] is cheaper than moving activations, or XLA would move these instead.
    model = debug_run.model(debug_run.TINY.__class__(64, 32, 1, 4, 2, 8, 64))
    mesh = debug_run.mesh(data=2, fsdp=2)
    rows = sharding.batch_sharding(mesh)
    put = lambda x: jax.device_put(x, rows)
    arguments = lambda layout: (
        jax.device_put(model, layout), put(np.ones((32, 3), np.int32)), put(np.ones((32, 3), bool)), put(np.arange(32, dtype=np.uint32)),
        draw.Rules.of(eos_ids=(1,), max_new_tokens=4),
    )  # fmt: skip
    options = dict(group_size=4, max_new_tokens=4, choice=draw.Choice(), dtype="float32")
    abstract = jax.eval_shape(lambda: model)

    def largest_moved(layout):
        text = decode._sample.lower(*arguments(layout), **options).compile().as_text()
        sizes = re.findall(r"= [^=]*?\w+\[([\d,]+)\]\S* (?:all-|collective-|reduce-scatter)", text)
        return max([int(np.prod([int(n) for n in size.split(",")])) for size in sizes], default=0)

    assert largest_moved(sharding.state_shardings(abstract, mesh)) >= 32 * 64  # the training layout gathers them
    assert largest_moved(sharding.state_shardings(abstract, sharding.sampling_mesh(mesh))) < 32 * 8


def test_parameters_are_initialised_alike_on_every_mesh():
    make = lambda: Transformer(debug_run.TINY, key=jax.random.key(3))
    abstract = jax.eval_shape(make)
    plain = jax.jit(make)()
    split = jax.jit(make, out_shardings=sharding.state_shardings(abstract, debug_run.mesh(fsdp=4)))()
    jax.tree.map(np.testing.assert_array_equal, plain, split)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(split))


def test_batches_split_their_rows_over_every_batch_axis():
    mesh = debug_run.mesh(data=2, fsdp=2)
    rows = jax.device_put(np.arange(8), sharding.batch_sharding(mesh))
    assert [shard.data.tolist() for shard in rows.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sharding.replicated(mesh).spec == P()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            dict(tensor=4),
            r"config.mesh.tensor=4 does not divide num_kv_heads=2 of config.model: valid sizes of tensor on 4 devices are 1, 2\.",
        ),
        (
            dict(expert=8),
            r"config.mesh.expert=8 does not divide num_experts=4 of config.model: valid sizes of expert on 8 devices are 1, 2, 4\.",
        ),
        (
            dict(fsdp=3),
            r"config.mesh.fsdp=3 does not divide embed_dim=16 of config.model: valid sizes of fsdp on 3 devices are 1\.",
        ),
        (
            dict(fsdp=3, expert=2),
            r"config.mesh.fsdp=3 x config.mesh.expert=2 does not divide embed_dim=16 of config.model: valid sizes of fsdp on 6 devices "
            r"are 1\.",
        ),
    ],
)
def test_what_the_mesh_does_not_divide_is_named_with_the_valid_sizes(sizes, message):
    architecture = dataclasses.replace(debug_run.FAMILIES["mixtral"], vocab_size=32)
    with pytest.raises(ConfigError, match=message):
        sharding.check_divisible(architecture, debug_run.mesh(**sizes))
    sharding.check_divisible(debug_run.TINY, debug_run.mesh(expert=4))  # no experts: the axis splits rows alone
