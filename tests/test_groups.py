"""From scored groups to what trains: admission, fixed shapes, masks, advantages, order. Plain NumPy, no model."""

import debug_run
import numpy as np
import pytest

from cispo_jax.training import groups
from cispo_jax.types import Rollout


def rollout(finish, T=3):
    B = len(finish)
    ones = np.ones((B, T), bool)
    return Rollout(
        np.full((B, 2), 5, np.int32), np.ones((B, 2), bool), np.arange(B * T, dtype=np.int32).reshape(B, T), ones, ones.copy(),
        -np.ones((B, T), np.float32), np.array(finish, np.int8),
    )  # fmt: skip


def scored(rewards):
    rewards = np.array(rewards, np.float64)
    P, G = rewards.shape
    return groups.Scored(
        rollout([0] * P * G), [{"prompt": str(p)} for p in range(P)], [f"{r}" for r in range(P * G)], rewards, {}
    )


def test_admission():
    nan = np.nan
    batch = scored([[1, 0], [1, 1], [nan, 1], [nan, nan], [0, 0]])
    assert groups.admit(batch, dynamic=True).tolist() == [True, False, False, False, False]
    assert groups.admit(batch, dynamic=False).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("live", "per_minibatch"),
    [
        ([1] * 8, [2, 2, 2, 2]),
        ([1, 0, 0, 1, 0, 0, 0, 1], [1, 1, 1, 0]),
        ([0] * 7 + [1], [1, 0, 0, 0]),
        ([0] * 8, [0] * 4),
    ],
)
def test_missing_groups_are_spread_evenly(live, per_minibatch):
    settings = debug_run.config(sampling__prompts_per_step=8, sampling__group_size=2)
    batch = scored([[i, i + 10 * on] for i, on in enumerate(live)])
    out, rewards_PG, live_P = groups.assemble([batch], [np.array(live, bool)], settings)
    assert live_P.reshape(4, 2).sum(axis=1).tolist() == per_minibatch
    # Rows and rewards move together, every group once.
    order = rewards_PG[:, 0].astype(int)
    assert sorted(order) == list(range(8)) and live_P.tolist() == [bool(live[p]) for p in order]
    np.testing.assert_array_equal(rewards_PG, batch.rewards[order])
    rows = batch.rollout.response_tokens.reshape(8, 2, -1)
    np.testing.assert_array_equal(out.response_tokens.reshape(8, 2, -1), rows[order])


def test_refills_are_taken_in_order_and_surplus_is_left():
    settings = debug_run.config(sampling__group_size=2)
    batches = [scored([[1, 0], [0, 0], [2, 1], [0, 0]]), scored([[3, 0], [4, 0], [5, 0], [0, 0]])]
    admitted = [groups.admit(batch, dynamic=True) for batch in batches]
    _, rewards_PG, live_P = groups.assemble(batches, admitted, settings)
    assert live_P.all() and sorted(rewards_PG[:, 0]) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), [[1.5, -0.5, -0.5, -0.5], [0, 0, 0, 0], [0, 0, 0, 0]]),
        (dict(objective__advantage_scale="none"), [[0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0], [0, 0, 0, 0]]),
        (dict(objective__advantage="rloo"), [[1, -1 / 3, -1 / 3, -1 / 3], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_advantages_of_scored_rows_only(options, expected):
    """[None, -1, -1, None] gives no signal at all (O-06)."""
    nan = np.nan
    rewards = np.array([[1.0, 0, 0, 0], [nan, -1, -1, nan], [nan, nan, nan, nan]])
    got = groups.compute_advantages(debug_run.config(**options), rewards, np.array([True, True, False]))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_batch_scale_leaves_out_groups_that_do_not_train():
    settings = debug_run.config(objective__advantage_scale="batch")
    rewards = np.array([[1.0, 0, 1, 0], [100, -100, 100, -100]])
    got = groups.compute_advantages(settings, rewards, np.array([True, False]))
    np.testing.assert_allclose(got, [[np.sqrt(3) / 2, -np.sqrt(3) / 2] * 2, [0] * 4], rtol=1e-5)


@pytest.mark.parametrize(("N", "epochs"), [(4, 1), (1, 4), (2, 2)])
def test_minibatches_hold_whole_groups_once_an_epoch(N, epochs):
    settings = debug_run.config(objective__num_minibatches=N, objective__num_epochs=epochs)
    rows = [np.arange(16)[s] for s in groups.minibatches(settings, 3, num_epochs=epochs)]
    assert len(rows) == N * epochs
    for epoch in range(epochs):
        assert sorted(np.concatenate(rows[epoch * N : (epoch + 1) * N])) == list(range(16))
    assert all(len(r) == 16 // N and r[0] % 4 == 0 for r in rows)


@pytest.mark.parametrize("train_truncated", [True, False])
def test_tokens_train_where_group_row_and_length_allow(train_truncated):
    settings = debug_run.config(sampling__group_size=2, objective__train_truncated=train_truncated)
    sampled = rollout([0, 1, 0, 0, 1, 0, 0, 0])
    sampled.loss_mask[0, 2] = False  # what the rollout leaves out stays out
    rewards = np.array([[1.0, 0], [np.nan, 1], [1, 0], [1, 0]])
    mask = groups.trained_tokens(settings, sampled, rewards, np.array([True, True, True, False]))
    rows = [True, train_truncated, False, True, train_truncated, True, False, False]
    expected = np.repeat(np.array(rows)[:, None], 3, axis=1)
    expected[0, 2] = False
    np.testing.assert_array_equal(mask, expected)
    assert sampled.loss_mask.sum() == 23  # the rollout itself is not changed
