"""AdamW against its equations, what decays, and the learning rate's value tables in both units."""

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax.config import OptimizerSettings
from cispo_jax.training.optimizer import learning_rate, make_optimizer


def rates(num_steps, updates_per_step, **settings):
    settings = OptimizerSettings(learning_rate=1.0, **settings)
    rate = lambda **at: learning_rate(settings, num_steps=num_steps, updates_per_step=updates_per_step, **at)
    return [[rate(step=step, update=u) for u in range(updates_per_step)] for step in range(1, num_steps + 1)]


COS = [0.5 * (1 + np.cos(np.pi * k / 4)) for k in range(4)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(), [[1, 1]] * 4),
        (dict(warmup=2), [[0.5, 0.5], [1, 1], [1, 1], [1, 1]]),
        (dict(warmup=4, warmup_unit="updates"), [[0.25, 0.5], [0.75, 1], [1, 1], [1, 1]]),
        (dict(warmup=3, warmup_unit="updates"), [[1 / 3, 2 / 3], [1, 1], [1, 1], [1, 1]]),
        (dict(schedule="linear"), [[1, 1], [0.75, 0.75], [0.5, 0.5], [0.25, 0.25]]),
        (dict(schedule="linear", warmup=2), [[0.5, 0.5], [1, 1], [1, 1], [0.5, 0.5]]),
        (dict(schedule="linear", warmup_unit="updates"), [[1, 0.875], [0.75, 0.625], [0.5, 0.375], [0.25, 0.125]]),
        (dict(schedule="cosine"), [[c, c] for c in COS]),
        (dict(schedule="cosine", warmup=4, warmup_unit="updates"), [[0.25, 0.5], [0.75, 1], COS[:2], COS[2:]]),
        (dict(warmup=10), [[0.1, 0.1], [0.2, 0.2], [0.3, 0.3], [0.4, 0.4]]),  # longer than the run
        (dict(schedule="linear", warmup=4), [[0.25, 0.25], [0.5, 0.5], [0.75, 0.75], [1, 1]]),
    ],
)
def test_learning_rates(settings, expected):
    """Four rollout steps of two updates each."""
    np.testing.assert_allclose(rates(4, 2, **settings), expected, rtol=1e-12)


def test_no_update_has_a_rate_of_zero_or_above_the_peak():
    for schedule in ("constant", "linear", "cosine"):
        for unit in ("updates", "rollout_steps"):
            for warmup in (0, 1, 3, 7):
                values = np.ravel(rates(7, 3, schedule=schedule, warmup=warmup, warmup_unit=unit))
                assert (values > 0).all() and (values <= 1).all()


def adamw(gradients, weights, settings, rate, decay):
    """Float64, from arXiv:1711.05101 and 1412.6980; the global norm is over all leaves."""
    m = [np.zeros_like(w) for w in weights]
    v = [np.zeros_like(w) for w in weights]
    for t, step in enumerate(gradients, 1):
        norm = np.sqrt(sum((g**2).sum() for g in step))
        for i, g in enumerate(step):
            if settings.max_grad_norm and norm > settings.max_grad_norm:
                g = g * settings.max_grad_norm / norm
            m[i] = settings.b1 * m[i] + (1 - settings.b1) * g
            v[i] = settings.b2 * v[i] + (1 - settings.b2) * g**2
            direction = m[i] / (1 - settings.b1**t) / (np.sqrt(v[i] / (1 - settings.b2**t)) + settings.eps)
            weights[i] = weights[i] - rate * (direction + decay[i] * settings.weight_decay * weights[i])
    return weights


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_updates_are_adamws(max_grad_norm):
    settings = OptimizerSettings(weight_decay=0.1, max_grad_norm=max_grad_norm, eps=1e-8)
    generator = np.random.default_rng(0)
    weights = {
        "kernel": generator.normal(size=(3, 2)),
        "final_norm": generator.normal(size=3),
        "query_bias": generator.normal(size=2),
    }
    gradients = [{k: 3 * generator.normal(size=w.shape) for k, w in weights.items()} for _ in range(4)]
    names = sorted(weights)
    expected = adamw(
        [[g[k] for k in names] for g in gradients],
        [weights[k] for k in names],
        settings,
        0.01,
        [k == "kernel" for k in names],
    )
    optimizer = make_optimizer(settings)
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)
    state = optimizer.init(tree)
    for gradient in gradients:
        direction, state = optimizer.update(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient), state, tree)
        tree = jax.tree.map(lambda w, d: w - 0.01 * d, tree, direction)
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(tree[name], value, rtol=2e-5, atol=1e-6)


def test_norms_and_biases_of_the_model_do_not_decay():
    import dataclasses

    config = dataclasses.replace(debug_run.TINY, qkv_bias=True, qk_norm=True, tied_head=False)
    model = debug_run.model(config)
    optimizer = make_optimizer(OptimizerSettings(weight_decay=1.0))
    zero = jax.tree.map(jnp.zeros_like, model)
    direction, _ = jax.jit(lambda m: optimizer.update(zero, optimizer.init(m), m))(model)
    decayed = {
        jax.tree_util.keystr(path): bool(np.abs(x).max() > 0)
        for path, x in jax.tree_util.tree_leaves_with_path(direction)
    }
    assert len(decayed) == 17
    for name, moves in decayed.items():
        assert moves == ("norm" not in name and "bias" not in name), name
    assert sum(decayed.values()) == 9  # embedding, head, four of the attention, three of the feed-forward


def test_the_recipes_eps_survives_float32():
    """eps = 1e-15 is added to the root, not under it: a gradient of 1e-10 still moves a weight by the rate."""
    optimizer = make_optimizer(OptimizerSettings(max_grad_norm=0.0))
    weights = {"kernel": jnp.ones(2)}
    direction, _ = optimizer.update({"kernel": jnp.array([1e-10, -1e-3])}, optimizer.init(weights), weights)
    np.testing.assert_allclose(direction["kernel"], [1, -1], rtol=1e-3)
