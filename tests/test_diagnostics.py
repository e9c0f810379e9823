import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cispo_jax
from cispo_jax import gradient_weights, masked
from cispo_jax.diagnostics import clip_sums, rollout_mismatch

RATIO = np.array([0.1, 0.5, 0.9, 1.0, 1.1, 1.25, 1.5, 3.0, 8.0], np.float32)


def table(function):
    """facts about one loss: weights at RATIO for A = 2 and A = -0.5."""
    return np.asarray(function(RATIO[None], np.array([[2.0], [-0.5]])))


def test_gradient_weights_of_ppo_and_dapo():
    """In the band r; A > 0 above and A < 0 below: 0; A < 0 above: r, unbounded; A > 0 below: r."""
    for loss_fn, high in ((cispo_jax.ppo_loss, 1.2), (cispo_jax.grpo_loss, 1.2), (cispo_jax.dapo_loss, 1.28)):
        positive = np.where(high < RATIO, 0, RATIO)
        negative = np.where(RATIO < 0.8, 0, RATIO)
        np.testing.assert_allclose(table(gradient_weights(loss_fn)), [positive, negative], rtol=1e-6)


def test_gradient_weights_of_cispo_and_reinforce():
    capped = np.minimum(RATIO, 1.28)
    np.testing.assert_allclose(
        table(gradient_weights(cispo_jax.cispo_loss, epsilon_high=0.28)), [capped] * 2, rtol=1e-6
    )
    np.testing.assert_allclose(table(gradient_weights(cispo_jax.cispo_loss)), [np.minimum(RATIO, 5)] * 2, rtol=1e-6)
    np.testing.assert_allclose(table(gradient_weights(cispo_jax.reinforce_loss)), [RATIO] * 2, rtol=1e-6)
    two_sided = table(gradient_weights(cispo_jax.cispo_loss, epsilon_low=0.2, epsilon_high=0.2))
    np.testing.assert_allclose(two_sided, [np.clip(RATIO, 0.8, 1.2)] * 2, rtol=1e-6)


def test_gradient_weights_of_the_unified_form():
    """PPO's mask with a capped weight: 0 where PPO drops, min(r, cap) at A < 0 and r above."""
    weights = table(gradient_weights(cispo_jax.unified_loss, weight_clip=(None, 0.28), mask_clip=(0.2, 0.28)))
    capped = np.minimum(RATIO, 1.28)
    np.testing.assert_allclose(
        weights, [np.where(RATIO > 1.28, 0, capped), np.where(RATIO < 0.8, 0, capped)], rtol=1e-6
    )
    unclipped = gradient_weights(cispo_jax.unified_loss, weight_clip=None, mask_clip=(0.2, 0.28))
    np.testing.assert_array_equal(table(unclipped), table(gradient_weights(cispo_jax.dapo_loss)))


def sapo_loss(log_probs, old_log_probs, advantages, loss_mask, *, tau_positive=1.0, tau_negative=1.05, **_):
    """SAPO (https://arxiv.org/abs/2511.20347) as a user would write it: a soft gate 4/tau sigmoid(tau (r - 1))."""
    advantages = advantages[:, None]
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    ratio = jnp.exp(jnp.where(loss_mask, log_probs - old_log_probs, 0))
    terms = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantages
    return -masked.masked_mean(terms, loss_mask), {}


def test_gradient_weights_of_a_users_loss():
    expected = []
    for tau in (1.0, 1.05):
        s = 1 / (1 + np.exp(-tau * (RATIO - 1.0)))
        expected.append(4 * s * (1 - s) * RATIO)
    np.testing.assert_allclose(table(gradient_weights(sapo_loss)), expected, rtol=1e-5)


def test_gradient_weights_broadcast_jit_and_vanish_without_advantage():
    weights = gradient_weights(cispo_jax.cispo_loss)
    assert weights(2.0, 1.0).shape == ()
    np.testing.assert_allclose(jax.jit(weights)(jnp.array([1e-3, 1e4]), 1.0), [1e-3, 5.0], rtol=1e-5)
    assert weights(2.0, 0.0) == 0
    np.testing.assert_allclose(weights(RATIO, 1.0), weights(RATIO, -7.0), rtol=1e-6)


def tokens():
    """ratio, advantage and mask of eight tokens in two rows; the last token of each row is masked garbage."""
    ratio = np.array([[1.25, 1.5, 6.0, np.nan], [0.5, 6.0, 1.0, np.inf]], np.float32)
    old = np.full((2, 4), -1.0, np.float32)
    return old + np.log(ratio), old, np.array([1.0, -1.0], np.float32), np.array([[1, 1, 1, 0], [1, 1, 1, 0]], bool)


def test_clip_sums():
    sums = clip_sums(*tokens())
    expected = {
        "clip/dropped_ppo": 4 / 6,  # three of A > 0 above 1.2, one of A < 0 below 0.8
        "clip/dropped_dapo": 3 / 6,  # 1.25 is inside 1.28
        "clip/at_cap": 2 / 6,  # r > 5, either sign of A
        "policy/ratio_mean": (1.25 + 1.5 + 6 + 0.5 + 6 + 1) / 6,
        "policy/ratio_max": 6.0,
    }
    chex.assert_trees_all_close(masked.means(sums), expected, rtol=1e-5)
    assert {float(count) for _, count in sums.values()} == {6.0}
    log_probs, old, advantages, mask = tokens()
    parts = [clip_sums(*(x[b : b + 1] for x in tokens())) for b in range(2)]
    chex.assert_trees_all_close(masked.add_sums(*parts), sums, rtol=1e-6)
    chex.assert_trees_all_close(jax.jit(clip_sums)(log_probs, old, advantages, mask), sums, rtol=1e-6)
    per_token = np.broadcast_to(advantages[:, None], mask.shape)
    chex.assert_trees_all_equal(clip_sums(log_probs, old, per_token, mask), sums)
    assert masked.means(clip_sums(*tokens(), epsilon_high=None))["clip/at_cap"] == 0
    assert masked.means(clip_sums(*tokens(), epsilon_high=0.4))["clip/at_cap"] == 0.5


def test_clip_sums_agree_with_the_losses_own_metrics():
    rng = np.random.default_rng(0)
    old = rng.normal(size=(4, 50)).astype(np.float32)
    arrays = (old + rng.normal(size=old.shape).astype(np.float32), old, rng.normal(size=4), rng.random(old.shape) < 0.7)
    means = masked.means(clip_sums(*arrays))
    assert means["clip/dropped_ppo"] == cispo_jax.ppo_loss(*arrays)[1]["dropped"] > 0
    assert means["clip/dropped_dapo"] == cispo_jax.dapo_loss(*arrays)[1]["dropped"] > 0
    cispo = cispo_jax.cispo_loss(*arrays)[1]
    assert means["clip/at_cap"] == cispo["at_cap"] > 0
    assert means["policy/ratio_max"] == cispo["ratio_max"]
    assert means["policy/ratio_mean"] == pytest.approx(float(cispo["ratio_mean"]))


def test_nothing_counted_gives_zeros():
    nan = np.full((2, 3), np.nan, np.float32)
    nothing = np.zeros((2, 3), bool)
    for values in (masked.means(clip_sums(nan, nan, nan[:, 0], nothing)), rollout_mismatch(nan, nan, nothing)):
        assert not any(values.values())


def test_rollout_mismatch():
    rng = np.random.default_rng(1)
    rollout = rng.normal(size=(8, 40)).astype(np.float32)
    log_probs = rollout + (rng.normal(size=rollout.shape) * 0.01).astype(np.float32)
    mask = rng.random(rollout.shape) < 0.6
    expected = np.abs(np.exp(log_probs.astype(np.float64) - rollout) - 1)[mask]
    values = jax.jit(rollout_mismatch)(np.where(mask, log_probs, np.nan), np.where(mask, rollout, -np.inf), mask)
    assert values["policy/rollout_mismatch_max"] == pytest.approx(expected.max(), rel=1e-4)
    assert values["policy/rollout_mismatch_p99"] == pytest.approx(np.quantile(expected, 0.99), rel=1e-4)
    assert values["policy/rollout_mismatch_mean"] == pytest.approx(expected.mean(), rel=1e-4)
    same = rollout_mismatch(rollout, rollout, mask)
    assert not any(same.values())


def test_bad_shapes_are_refused():
    zeros = np.zeros((2, 3))
    with pytest.raises(ValueError, match="advantages must be"):
        clip_sums(zeros, zeros, np.zeros(3), zeros)
    with pytest.raises(ValueError, match="rollout_log_probs must be"):
        rollout_mismatch(zeros, np.zeros((2, 4)), zeros)


def test_strict_type_promotion():
    arrays = (
        np.full((2, 3), -1, np.float32),
        np.full((2, 3), -1.5, np.float32),
        np.ones(2, np.float32),
        np.ones((2, 3), bool),
    )
    valid = np.array([[True, True, False]])
    functions = {
        "sums": lambda: clip_sums(*arrays),
        "mismatch": lambda: rollout_mismatch(arrays[0], arrays[1], arrays[3]),
        "weights": lambda: gradient_weights(cispo_jax.cispo_loss)(RATIO, np.float32(1)),
        "kl": lambda: cispo_jax.kl_penalty(arrays[0], arrays[1], arrays[3]),
        "advantages": lambda: cispo_jax.group_relative_advantages(np.eye(1, 3, dtype=np.float32), valid_PG=valid),
        "rloo": lambda: cispo_jax.rloo_advantages(np.eye(1, 3, dtype=np.float32), valid_PG=valid),
    }
    for name, function in functions.items():
        with jax.numpy_dtype_promotion("strict"):
            strict = function()
        chex.assert_trees_all_equal(strict, function(), custom_message=name)
