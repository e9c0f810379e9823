"""Losses and metrics of routers on cases with known values (public reports O-23, O-24)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax.routing import RouterSums, load_balance_loss, router_metrics, router_z_loss


def sums_of(logits_NE, K, weight_N=None) -> RouterSums:
    """One layer, by the book."""
    weight_N = jnp.ones(len(logits_NE)) if weight_N is None else jnp.asarray(weight_N, jnp.float32)
    _, chosen = jax.lax.top_k(logits_NE, K)
    load = jnp.sum(jax.nn.one_hot(chosen, logits_NE.shape[1]) * weight_N[:, None, None], axis=(0, 1))
    z = jnp.sum(weight_N * jax.nn.logsumexp(logits_NE, axis=-1) ** 2)
    probs = weight_N @ jax.nn.softmax(logits_NE)
    zero = jnp.float32(0)
    return RouterSums(load[None], probs[None], z[None], weight_N.sum(), zero, zero, zero)


REPORTED = np.log([[0.7 if e == n else 0.1 for e in range(4)] for n in range(4)]).astype(np.float32)
PADS = np.tile(REPORTED[:1], (4, 1))


def test_balanced_routing_costs_one_and_pads_do_not_count():
    np.testing.assert_allclose(load_balance_loss(sums_of(REPORTED, 1)), 1.0, rtol=1e-6)
    padded = np.concatenate([REPORTED, PADS])
    np.testing.assert_allclose(load_balance_loss(sums_of(padded, 1, [1] * 4 + [0] * 4)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(load_balance_loss(sums_of(padded, 1)), 1.45, rtol=1e-6)  # what counting them would give


@pytest.mark.parametrize("K", [1, 2, 3])
def test_balanced_is_one_whatever_k_is(K):
    logits = np.stack([np.roll([3.0, 2.0, 1.0, 0.0], n) for n in range(4)]).astype(np.float32)
    np.testing.assert_allclose(load_balance_loss(sums_of(logits, K)), 1.0, rtol=1e-6)


def test_the_gradient_reaches_the_router_and_flows_through_the_probabilities_alone():
    logits = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    of = lambda coefficient: jax.grad(lambda x: coefficient * load_balance_loss(sums_of(x, 2)))(logits)
    once = np.asarray(of(0.01))
    assert np.abs(once).max() > 1e-6
    np.testing.assert_allclose(of(0.02), 2 * once, rtol=1e-6)
    assert not np.asarray(of(0.0)).any()
    load = np.asarray(sums_of(logits, 2).load_LE[0]) / 32
    expected = jax.grad(lambda x: 0.01 * 4 * jnp.sum(load * jax.nn.softmax(x).mean(axis=0)))(logits)
    np.testing.assert_allclose(once, expected, rtol=1e-5, atol=1e-9)


def test_parts_of_a_batch_add_up_to_it():
    logits = np.random.default_rng(1).normal(size=(12, 4)).astype(np.float32)
    whole, parts = sums_of(logits, 2), [sums_of(logits[:5], 2), sums_of(logits[5:], 2)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), parts[0].plus(parts[1]), whole)
    for loss in (load_balance_loss, router_z_loss):
        np.testing.assert_allclose(sum(loss(part, whole) for part in parts), loss(whole), rtol=1e-5)
        assert abs(loss(parts[0]) - loss(whole)) > 1e-3  # a part alone has another


def test_metrics():
    sums = RouterSums(
        load_LE=jnp.array([[6.0, 2, 0, 0], [2, 2, 2, 2]]),
        probs_LE=jnp.array([[2.0, 1, 0.5, 0.5], [1, 1, 1, 1]]),
        z_L=jnp.array([8.0, 4.0]),
        tokens=jnp.float32(4),
        replaced=jnp.float32(3),
        replaced_tokens=jnp.float32(2),
        recorded_tokens=jnp.float32(4),
    )
    found = {name: float(value) for name, value in router_metrics(sums).items()}
    assert found == pytest.approx(
        {
            "moe/balance_loss": (4 * (0.75 * 0.5 + 0.25 * 0.25) + 1) / 2,
            "moe/z_loss": 1.5,
            "moe/max_violation": 2.0,  # expert 0 of the first layer has 3 times the mean
            "moe/replaced": 3 / 8,
            "moe/replaced_tokens": 0.5,
            "moe/load/e000": 2.0,
            "moe/load/e001": 1.0,
            "moe/load/e002": 0.5,
            "moe/load/e003": 0.5,
        }
    )


def test_nothing_counted_is_finite():
    zeros = RouterSums(jnp.zeros((1, 4)), jnp.zeros((1, 4)), jnp.zeros(1), *[jnp.float32(0)] * 4)
    assert all(np.isfinite(value) for value in router_metrics(zeros).values())
    assert np.isfinite(jax.grad(lambda p: load_balance_loss(zeros._replace(probs_LE=p)))(jnp.zeros((1, 4)))).all()
