import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cispo_jax import group_relative_advantages, rloo_advantages
from tests import oracles

GOLDEN = json.loads((pathlib.Path(__file__).parent / "data" / "group_advantages.json").read_text())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ddof0_eps1e-06", {"ddof": 0}),
        ("ddof0_eps0.0001", {"ddof": 0, "epsilon": 1e-4}),
        ("ddof1_eps1e-06", {}),
        ("ddof1_eps0.0001", {"epsilon": 1e-4}),
        ("no_std", {"scale": None}),
    ],
)
def test_golden_values(name, arguments):
    """These change only if the definition of the advantage does: other libraries agree on them."""
    rewards = np.reshape(GOLDEN["rewards"], (5, 4))
    expected = np.reshape(GOLDEN["reference"][name], (5, 4))
    np.testing.assert_allclose(group_relative_advantages(rewards, **arguments), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", None])
@pytest.mark.parametrize("ddof", [0, 1])
def test_agrees_with_float64_oracle(scale, ddof):
    rng = np.random.default_rng(ddof)
    rewards = rng.normal(size=(6, 5)).astype(np.float32)
    valid = rng.random((6, 5)) < 0.7
    valid[0], valid[1] = False, [True, False, False, False, False]
    expected = oracles.group_advantages(rewards, valid, scale, ddof, 1e-6)
    dirty = np.where(valid, rewards, np.nan)
    result = jax.jit(lambda r, v: group_relative_advantages(r, scale=scale, valid_PG=v, ddof=ddof))(dirty, valid)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@given(
    value=st.floats(-1e4, 1e4, width=32),
    size=st.sampled_from([3, 8, 16]),
    scale=st.sampled_from(["group", "batch", None]),
)
@settings(max_examples=40, deadline=None)
def test_identical_rewards_give_exactly_zero(value, size, scale):
    rewards = np.full((1, size), value, np.float32)
    np.testing.assert_array_equal(group_relative_advantages(rewards, scale=scale, epsilon=1e-8), 0)
    np.testing.assert_array_equal(group_relative_advantages(rewards, scale=scale, epsilon=0.0), 0)
    np.testing.assert_array_equal(rloo_advantages(rewards), 0)


@pytest.mark.parametrize("value", [0.7, 0.1, 0.3, 0.35])
def test_report_identical_float32_rewards(value):
    """NeMo-RL #1518: the mean of eight equal float32 rewards is one ulp off, and the division made 0.43 to 0.86 of it."""
    np.testing.assert_array_equal(group_relative_advantages(np.full((1, 8), value, np.float32), epsilon=1e-8), 0)


def test_report_outlier_stays_bounded():
    """NeMo-RL #4158: E[x^2] - E[x]^2 in float32 turned this group's advantage into -2075."""
    rewards = np.array([[0.0] + [0.95] * 7], np.float32)
    assert np.abs(group_relative_advantages(rewards)).max() < 2.5  # (G - 1) / sqrt(G) = 2.475 bounds any group of 8
    np.testing.assert_allclose(rloo_advantages(rewards), [[-0.95] + [0.95 / 7] * 7], rtol=1e-5)
    with_offset = rewards + 1e4  # the two-pass variance does not cancel
    np.testing.assert_allclose(group_relative_advantages(with_offset), group_relative_advantages(rewards), rtol=1e-3)


def test_report_population_or_sample_deviation():
    rewards = [[1.0, 0, 0, 0]]
    np.testing.assert_allclose(
        group_relative_advantages(rewards, ddof=0), [[1.7321, -0.5774, -0.5774, -0.5774]], atol=1e-4
    )
    np.testing.assert_allclose(group_relative_advantages(rewards), [[1.5, -0.5, -0.5, -0.5]], atol=1e-4)


def test_report_unscored_rewards_are_no_signal():
    """TRL #5902: rewards [None, -1, -1, None] became [0, -1, -1, 0] and rewarded the unscorable rows with +0.5."""
    rewards = np.array([[np.nan, -1, -1, np.nan], [1, 0, 0, 0], [np.nan] * 4], np.float32)
    valid = ~np.isnan(rewards)
    for advantages in (
        group_relative_advantages(rewards, scale=None, valid_PG=valid),
        rloo_advantages(rewards, valid_PG=valid),
    ):
        np.testing.assert_array_equal(advantages[0], 0)
        np.testing.assert_array_equal(advantages[2], 0)
    np.testing.assert_allclose(
        group_relative_advantages(rewards, valid_PG=valid)[1], [1.5, -0.5, -0.5, -0.5], atol=1e-5
    )
    for scale in ("group", "batch"):
        assert np.isfinite(group_relative_advantages(rewards, valid_PG=valid, scale=scale)).all()


def test_report_rows_are_dropped_after_the_group_statistics():
    """open-instruct #1794: with the advantages computed first, dropping truncated rows mixes no prompts."""
    rewards = np.array([[1.0, 0, 1, 0], [1, 1, 1, 0]], np.float32)
    kept = np.array([[True, True, False, True], [True, False, False, False]])
    advantages = np.asarray(group_relative_advantages(rewards, scale=None))[kept]
    np.testing.assert_allclose(advantages, [0.5, -0.5, -0.5, 0.25])


def test_leave_one_out_is_the_mean_of_the_others():
    rng = np.random.default_rng(3)
    rewards, valid = rng.normal(size=(4, 6)).astype(np.float32), rng.random((4, 6)) < 0.6
    valid[3] = [True] + [False] * 5  # nothing left out to compare with
    expected = np.zeros((4, 6))
    for p, g in zip(*np.nonzero(valid), strict=True):
        others = [float(rewards[p, k]) for k in range(6) if valid[p, k] and k != g]
        expected[p, g] = rewards[p, g] - np.mean(others) if others else 0.0
    dirty = np.where(valid, rewards, np.inf)
    np.testing.assert_allclose(rloo_advantages(dirty, valid_PG=valid), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rloo_advantages([[1, 0, 0, 0]]), [[1, -1 / 3, -1 / 3, -1 / 3]], rtol=1e-6)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from(["group", "batch", None]))
@settings(max_examples=20, deadline=None)
def test_order_of_groups_and_rows_and_padding_change_nothing(seed, scale):
    rng = np.random.default_rng(seed)
    rewards, valid = rng.normal(size=(4, 5)).astype(np.float32), rng.random((4, 5)) < 0.8
    base = np.asarray(group_relative_advantages(rewards, valid_PG=valid, scale=scale))
    p, g = rng.permutation(4), rng.permutation(5)
    moved = group_relative_advantages(rewards[p][:, g], valid_PG=valid[p][:, g], scale=scale)
    np.testing.assert_allclose(moved, base[p][:, g], rtol=1e-5, atol=1e-6)
    other = np.where(valid, rewards, rng.normal(size=(4, 5)) * 1e6).astype(np.float32)
    np.testing.assert_array_equal(group_relative_advantages(other, valid_PG=valid, scale=scale), base)


def test_not_differentiated_and_half_precision_in_float32():
    assert not jax.grad(lambda r: group_relative_advantages(r).sum())(jnp.array([[1.0, 0, 2]])).any()
    rewards = jnp.array([[1.0, 0, 0, 0]], jnp.bfloat16)
    assert group_relative_advantages(rewards).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 1)])
def test_degenerate_shapes(shape):
    for result in (group_relative_advantages(np.ones(shape)), group_relative_advantages(np.ones(shape), scale="batch")):
        np.testing.assert_array_equal(result, np.zeros(shape))
    np.testing.assert_array_equal(rloo_advantages(np.ones(shape)), np.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"scale": "prompt"}, "scale='prompt'; valid: 'group', 'batch', None"),
        ({"ddof": -1}, "ddof"),
        ({"epsilon": -1e-6}, "epsilon"),
        ({"valid_PG": np.ones(3)}, "valid_PG"),
    ],
)
def test_bad_settings_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        group_relative_advantages(np.ones((2, 3)), **arguments)
    with pytest.raises(ValueError, match="rewards"):
        group_relative_advantages(np.ones(3))


def test_epsilon_may_be_traced():
    rewards = jnp.array([[1.0, 0.0, 0.0]])
    traced = jax.jit(lambda epsilon: group_relative_advantages(rewards, epsilon=epsilon))(1e-4)
    np.testing.assert_allclose(traced, group_relative_advantages(rewards, epsilon=1e-4), rtol=1e-6)
