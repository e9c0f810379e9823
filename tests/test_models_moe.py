"""Router and experts: values and gradients against NumPy, replayed selections, memory, and experts split over devices."""

import dataclasses

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import oracle

from cispo_jax import sharding
from cispo_jax.models import forward
from cispo_jax.models.dispatch import Experts
from cispo_jax.models.moe import MoeMlp, dense_experts

MIXTRAL, RAW = debug_run.FAMILIES["mixtral"], debug_run.FAMILIES["qwen3_moe"]
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]], np.int32)
FORWARD = jax.jit(forward)


def layer(config=MIXTRAL):
    """Experts of one layer, filled like the models of the other tests."""
    return jax.tree.map(lambda leaf: leaf[0], debug_run.model(config).layers[0].mlp)


def weights(mlp) -> Experts:
    return Experts(mlp.gate[...], mlp.up[...], mlp.down[...])


def inputs(T=12, D=16, seed=0):
    return np.random.default_rng(seed).normal(size=(T, D)).astype(np.float32)


# ---- the router


@pytest.mark.parametrize("config", [MIXTRAL, RAW], ids=["normalized", "raw"])
def test_gates_are_probabilities_of_the_likeliest_experts(config):
    mlp, x = layer(config), inputs()
    gates, ids, *_ = mlp.route(x)
    logits = x.astype(np.float64) @ np.asarray(mlp.router[...], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected_ids = np.argsort(-p, axis=1)[:, :2]
    np.testing.assert_array_equal(ids, expected_ids)
    expected = np.take_along_axis(p, expected_ids, axis=1)
    expected = expected / expected.sum(axis=1, keepdims=True) if config is MIXTRAL else expected
    np.testing.assert_allclose(gates, expected, rtol=1e-5)
    assert gates.dtype == jnp.float32 and mlp.route(x.astype(jnp.bfloat16))[0].dtype == jnp.float32


@pytest.mark.parametrize("config", [MIXTRAL, RAW], ids=["normalized", "raw"])
def test_a_replayed_selection_has_todays_gates_and_gradients(config):
    """Only the selection is given (O-25): the router's gradient is not 0."""
    mlp, x = layer(config), inputs()
    given = np.random.default_rng(1).permuted(np.tile(np.arange(4), (12, 1)), axis=1)[:, :2]
    gates, ids, *_ = mlp.route(x, given)
    np.testing.assert_array_equal(ids, given)
    logits = x @ np.asarray(mlp.router[...])
    p = np.take_along_axis(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), given, axis=1)
    np.testing.assert_allclose(gates, p / p.sum(axis=1, keepdims=True) if config is MIXTRAL else p, rtol=1e-4)
    gradient = jax.grad(lambda m: jnp.sum(m(x[None], None, given[None])[0] ** 2))(mlp)
    assert np.abs(gradient.router[...]).max() > 1e-3


@pytest.mark.parametrize("sentinel", [np.int8(-1), np.uint8(255), np.uint16(65535), np.int32(4)])
def test_a_token_without_a_record_is_routed_anew(sentinel):
    mlp, x = layer(), inputs()
    own_gates, own, *_ = mlp.route(x)
    given = np.array(own[:, ::-1]).astype(sentinel.dtype)
    given[[2, 5]] = sentinel
    gates, ids, *_ = mlp.route(x, given)
    unrecorded = np.isin(np.arange(12), [2, 5])
    np.testing.assert_array_equal(ids, np.where(unrecorded[:, None], own, own[:, ::-1]))
    np.testing.assert_allclose(gates, np.where(unrecorded[:, None], own_gates, own_gates[:, ::-1]), rtol=1e-6)


def test_a_given_selection_of_hopeless_experts_stays_finite():
    """Their probabilities are 0 in float32; the normalised gates still sum to 1."""
    mlp = layer()
    mlp.router = type(mlp.router)(jnp.zeros((16, 4)).at[0, 0].set(300.0))
    given = np.tile([2, 3], (12, 1))
    gates, *_ = mlp.route(np.ones((12, 16), np.float32), given)
    np.testing.assert_allclose(gates, 0.5)


def test_forward_replays_layer_by_layer():
    """A selection of [B, T, L, K]; layers without experts do not read theirs, pads hold the sentinel."""
    for name in ("minimax", "mixed"):
        model = debug_run.model(debug_run.FAMILIES[name])
        L = model.config.num_layers
        given = (
            np.random.default_rng(0).permuted(np.tile(np.arange(4), (2, 7, L, 1)), axis=-1)[..., :2].astype(np.uint8)
        )
        for layer in range(L):
            if model.config.kinds(layer)[1] == "dense":
                given[:, :, layer] = 255
        logits = np.asarray(FORWARD(model, TOKENS, expert_ids_BTLK=given))
        for row, ids, got in zip(TOKENS, given, logits, strict=True):
            np.testing.assert_allclose(got, oracle(model, row, ids), rtol=1e-4, atol=1e-4)
        assert np.abs(logits - FORWARD(model, TOKENS)).max() > 0.05
        nothing = np.full_like(given, 255)
        np.testing.assert_array_equal(FORWARD(model, TOKENS, expert_ids_BTLK=nothing), FORWARD(model, TOKENS))


# ---- the experts


def chosen(T=12, E=4, seed=2):
    generator = np.random.default_rng(seed)
    ids = generator.permuted(np.tile(np.arange(E), (T, 1)), axis=1)[:, :2]
    return generator.random((T, 2)).astype(np.float32), ids


def by_hand(mlp, x, gates, ids):
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), mlp)
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for gate, e in zip(gates[t], ids[t], strict=True):
            hidden = x[t] @ w.gate[...][e]
            out[t] += gate * ((hidden / (1 + np.exp(-hidden))) * (x[t] @ w.up[...][e])) @ w.down[...][e]
    return out


def test_dense_experts_are_the_gated_sum():
    mlp, x, (gates, ids) = layer(), inputs(), chosen()
    np.testing.assert_allclose(
        dense_experts(weights(mlp), x, gates, ids), by_hand(mlp, x, gates, ids), rtol=1e-4, atol=1e-6
    )


def test_an_expert_without_tokens_has_a_gradient_of_exactly_zero():
    mlp, x, (gates, _) = layer(), inputs(), chosen()
    ids = np.tile([0, 2], (12, 1))
    gradient = jax.jit(jax.grad(lambda m: jnp.sum(dense_experts(weights(m), x, gates, ids) ** 2)))(mlp)
    for leaf in (gradient.gate[...], gradient.up[...], gradient.down[...]):
        assert np.abs(leaf[0]).max() > 0 and np.abs(leaf[2]).max() > 0
        assert not np.asarray(leaf[1]).any() and not np.asarray(leaf[3]).any()


def test_no_array_holds_every_token_for_every_expert():
    """Neither forward nor backward: the largest one is the experts' weights."""
    config = dataclasses.replace(MIXTRAL, num_experts=8, embed_dim=4, expert_dim=16)
    mlp = jax.eval_shape(lambda: MoeMlp(config, key=jax.random.key(0)))
    x = jax.ShapeDtypeStruct((1, 100, 4), jnp.float32)
    gradient = jax.grad(lambda m, x: jnp.sum(m(x)[0] ** 2), argnums=(0, 1))
    sizes = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(variable.aval.size for variable in equation.outvars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(gradient)(mlp, x).jaxpr)
    assert 100 * 16 <= max(sizes) < 100 * 8 * 16


def test_experts_split_over_devices_give_the_same_loss_and_gradients():
    """Every leaf, the router's included (O-26)."""
    model = debug_run.model(debug_run.FAMILIES["minimax"])
    mesh = debug_run.mesh(expert=4)
    split = jax.device_put(model, sharding.state_shardings(jax.eval_shape(lambda: model), mesh))
    assert split.layers[1].mlp.gate[...].addressable_shards[0].data.shape == (2, 1, 16, 8)
    tokens = np.tile(TOKENS, (2, 1))
    weights = np.random.default_rng(0).normal(size=(4, 7, 17)).astype(np.float32)
    loss = jax.jit(jax.value_and_grad(lambda m, tokens: jnp.sum(forward(m, tokens) * weights)))
    expected = loss(model, tokens)
    got = jax.block_until_ready(loss(split, jax.device_put(tokens, sharding.batch_sharding(mesh))))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    jax.tree.map(close, got, expected)
