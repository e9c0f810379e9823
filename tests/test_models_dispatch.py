"""Every way to reach the experts against the dense reference: one device, every mesh, both exchanges; values and gradients."""

import functools

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import sharding
from cispo_jax.config import MeshSettings
from cispo_jax.models import dispatch
from cispo_jax.models.dispatch import Experts, expert_outputs, local_experts
from cispo_jax.models.moe import dense_experts

T, D, F, E, K = 50, 8, 12, 8, 2
MESHES = {
    "data": dict(data=4),
    "fsdp": dict(fsdp=4),
    "expert": dict(expert=4),
    "data_expert": dict(data=2, expert=2),
    "fsdp_expert": dict(fsdp=2, expert=2),
    "expert_tensor": dict(expert=2, tensor=2),
}


def arrays(seed=0):
    generator = np.random.default_rng(seed)
    draw = lambda *shape: (0.3 * generator.normal(size=shape)).astype(np.float32)
    ids = generator.permuted(np.tile(np.arange(E, dtype=np.int32), (T, 1)), axis=1)[:, :K]
    ids[generator.random(T) < 0.2] = -1  # pads
    return Experts(draw(E, D, F), draw(E, D, F), draw(E, F, D)), draw(T, D), np.abs(draw(T, K)), ids, draw(T, D)


def value_and_gradients(function, experts, tokens, gates, ids, cotangent):
    loss = lambda *differentiable: jnp.sum(function(*differentiable, ids) * cotangent)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(experts, tokens, gates)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max()), a, b)


LOADS = {
    "spread": lambda ids: ids,
    "one": lambda ids: np.where(ids < 0, -1, np.tile(np.arange(K, dtype=np.int32), (T, 1))),
    "pads": lambda ids: np.full_like(ids, -1),
}


@pytest.fixture(scope="module", params=LOADS)
def case(request):
    experts, tokens, gates, ids, cotangent = arrays()
    inputs = experts, tokens, gates, LOADS[request.param](ids), cotangent
    return request.param, inputs, value_and_gradients(dense_experts, *inputs)


def test_one_device(case):
    _, inputs, expected = case
    close(value_and_gradients(local_experts, *inputs), expected)


def test_experts_without_tokens_have_gradients_of_exactly_zero(case):
    load, inputs, _ = case
    _, (experts, tokens, gates) = value_and_gradients(local_experts, *inputs)
    idle = {"spread": 0, "one": E - K, "pads": E}[load]
    for leaf in experts:
        zero = ~np.asarray(leaf).reshape(E, -1).any(axis=1)
        assert zero.sum() == idle and zero[E - idle :].all()
    pads = (inputs[3] < 0).all(axis=1)
    assert not np.asarray(tokens)[pads].any() and not np.asarray(gates)[pads].any()


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh(case, name):
    """All tokens to one device's experts and rows that do not divide included; gradients do not grow with the axis."""
    load, inputs, expected = case
    if load == "pads" and name != "expert_tensor":
        return
    mesh = debug_run.mesh(**MESHES[name])
    close(jax.block_until_ready(sharding.OnMesh(mesh, value_and_gradients)(expert_outputs, *inputs)), expected)


@pytest.mark.parametrize("rows", [64, 8])
def test_chunks_change_nothing(case, monkeypatch, rows):
    _, inputs, expected = case
    monkeypatch.setattr(dispatch, "BUFFER_ROWS", rows)
    assert dispatch.chunk_tokens(2, 4, K) == rows // 4 < T // 2
    mesh = debug_run.mesh(data=2, expert=2)
    close(jax.block_until_ready(sharding.OnMesh(mesh, value_and_gradients)(expert_outputs, *inputs)), expected)


@pytest.mark.parametrize("block", [1, 8, 128])
def test_blocks_of_any_size(case, block):
    _, (experts, tokens, gates, ids, cotangent), expected = case
    blocked = functools.partial(dispatch._blocked_swiglu, block)

    def function(experts, tokens, gates, ids):
        chosen = jnp.where(ids < 0, E, ids).reshape(-1)
        order = jnp.argsort(chosen, stable=True)
        outputs = blocked(tokens[order // K], dispatch.count(chosen, E), experts)
        return dispatch.combine(jnp.zeros_like(outputs).at[order].set(outputs), gates)

    close(value_and_gradients(function, experts, tokens, gates, ids, cotangent), expected)


def test_the_grouped_product_of_accelerators_is_that_of_cpu(case, monkeypatch):
    """`ragged_dot`, which CPU computes too (slowly), with garbage after the last group."""
    _, inputs, expected = case
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    close(value_and_gradients(local_experts, *inputs), expected)


def test_rows_after_the_last_group_are_zero_even_if_they_hold_nan():
    experts, tokens, *_ = arrays()
    sizes = jnp.zeros(E, jnp.int32).at[jnp.array([1, 4])].set(jnp.array([7, 20]))
    tokens[27:] = np.nan
    value, gradients = jax.value_and_grad(lambda e, x: jnp.sum(dispatch.grouped_swiglu(x, sizes, e)), argnums=(0, 1))(
        experts, tokens
    )
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert not np.asarray(gradients[1])[27:].any()


def test_the_exchange_for_accelerators_lowers():
    """CPU cannot run `ragged_all_to_all`; its trace must hold it, forward and backward, and no gather of the tokens."""
    mesh = debug_run.mesh(expert=4)
    experts, tokens, gates, ids, _ = arrays()
    loss = lambda *inputs: jnp.sum(expert_outputs(*inputs, ids) ** 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "platform", lambda: "tpu")
        with jax.set_mesh(mesh):
            text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(experts, tokens, gates))
    assert text.count("ragged_all_to_all") >= 4
    gathered = [line for line in text.splitlines() if "all_gather[" in line]
    assert gathered and all(f"f32[4,{K * -(-T // 4)}" not in line for line in gathered)


def test_decoding_small_batches_takes_small_blocks():
    assert dispatch.block_rows(256, 32) == 8
    assert dispatch.block_rows(8192, 32) == 128 == dispatch.block_rows(8192, 64)
    assert dispatch.block_rows(4, 32) == 8


def test_without_a_mesh_of_ours_experts_are_at_hand():
    experts, tokens, gates, ids, _ = arrays()
    other = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(other):
        found = jax.jit(expert_outputs)(experts, tokens, gates, ids)
    close(found, dense_experts(experts, tokens, gates, ids))
    one = sharding.make_mesh(MeshSettings(), jax.devices()[:1])
    close(sharding.OnMesh(one, jax.jit(expert_outputs))(experts, tokens, gates, ids), found)
