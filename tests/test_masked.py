import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import masked

GARBAGE = jnp.array([[1.0, jnp.nan, 3.0], [jnp.inf, 5.0, -jnp.inf]])
MASK = jnp.array([[True, False, True], [False, True, False]])


def test_garbage_under_the_mask_reaches_neither_value_nor_gradient():
    for fn, expected in ((masked.masked_sum, 9.0), (masked.masked_mean, 3.0), (masked.masked_max, 5.0)):
        value, gradient = jax.value_and_grad(fn)(GARBAGE, MASK)
        assert value == expected
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[~MASK], 0)


def test_empty_mask_gives_zero():
    nothing = jnp.zeros_like(MASK)
    for fn in (
        masked.masked_sum,
        masked.masked_mean,
        masked.masked_max,
        lambda x, m: masked.masked_quantile(x, m, 0.99),
    ):
        assert fn(GARBAGE, nothing) == 0
        assert fn(GARBAGE[:0], nothing[:0]) == 0


def test_sums_are_float32_and_counts_exact():
    x = jnp.full((1, 4096), 0.1, jnp.bfloat16)
    assert masked.masked_sum(x, jnp.ones(x.shape, bool)) == pytest.approx(4096 * float(x[0, 0]), rel=1e-6)
    count = masked.masked_count(jnp.ones((1, 2**24 + 5), bool))  # 2**24 + 1 is where float32 stops counting
    assert count.dtype == jnp.float32 and count == 2**24 + 4  # the nearest float32


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_quantile_is_numpys(q):
    x = np.random.default_rng(0).normal(size=(7, 31)).astype(np.float32)
    mask = np.random.default_rng(1).random(x.shape) < 0.4
    x_dirty = np.where(mask, x, np.nan)
    np.testing.assert_allclose(
        masked.masked_quantile(jnp.array(x_dirty), jnp.array(mask), q), np.quantile(x[mask], q), rtol=1e-6
    )


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5, -3, 5, 2**31 - 1, -(2**31), -3], np.int32),
        np.array([2**40, 2**40 + 2**32, 0, 2**40, -(2**62), 0]),  # equal in the lower 32 bits
        np.array([[1, 1, 0], [7, 0, 1]], np.uint8),
        [3, 3, 1],
        np.zeros((2, 0), int),
    ],
)
def test_dense_ids_keep_equality(ids):
    dense = np.asarray(masked.dense_ids(ids))
    flat = np.asarray(ids).ravel()
    assert dense.shape == np.shape(ids)
    np.testing.assert_array_equal(dense.ravel()[:, None] == dense.ravel(), flat[:, None] == flat)
    assert dense.size == 0 or (dense.min() >= 0 and dense.max() < dense.size)
    if flat.dtype in (np.int32, np.uint8) and flat.size:
        np.testing.assert_array_equal(jax.jit(masked.dense_ids)(jnp.asarray(ids)), dense)


def test_response_ids_of_packed_rows_do_not_meet():
    segments = jnp.array([[1, 1, 9, 0], [1, 2, 2, 0]])
    ids = masked.response_ids((2, 4), segments)
    assert len(np.unique(ids[np.asarray(segments) > 0])) == 4
    assert ids[0, 0] == ids[0, 1] and ids[1, 1] == ids[1, 2]


def test_unit_sum_by_row_and_by_token():
    x = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    in_unit, by_unit = masked.unit_sum(x, jnp.array([0, 2, 0]))
    np.testing.assert_array_equal(in_unit, [[30], [15], [30]])
    np.testing.assert_array_equal(by_unit, [30, 0, 15])
    in_unit, by_unit = masked.unit_sum(x, jnp.array([[0, 0, 1], [1, 1, 1], [8, 8, 0]]))
    np.testing.assert_array_equal(in_unit, [[12, 12, 18], [18, 18, 18], [15, 15, 12]])
    assert by_unit.shape == (9,) and by_unit.sum() == 45


def test_pooling_is_not_a_mean_of_means():
    one = {"loss": (jnp.array(4.0), jnp.array(1.0)), "ratio_max": (jnp.array(3.0), jnp.array(1.0))}
    three = {"loss": (jnp.array(0.0), jnp.array(3.0)), "ratio_max": (jnp.array(2.0), jnp.array(3.0))}
    pooled = masked.add_sums(one, three)
    chex.assert_trees_all_close(masked.means(pooled), {"loss": 1.0, "ratio_max": 3.0})
    nothing = {"loss": (jnp.array(0.0), jnp.array(0.0))}
    assert masked.means(nothing)["loss"] == 0
    with pytest.raises(ValueError, match="ratio_max"):
        masked.add_sums(one, nothing)
