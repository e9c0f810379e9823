"""Attention by blocks against all scores at once: value, gradient, every layout of a row; its memory is linear in the length."""

import functools

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import models
from cispo_jax.models import attention
from cispo_jax.models.attention import attend

M, G, H = 2, 3, 4
ALL = 10**6  # a block that holds any test: all scores at once


def layouts(T):
    """Segments and prefixes [rows, T]; ids grow along a row."""
    columns = np.arange(T)
    packed = np.sort(np.random.default_rng(0).integers(1, 4, T))
    half = T // 2
    # A prompt and three responses to it, then another prompt and one; pads at the end.
    tree = np.select(
        [columns < half // 2, columns < half // 2 + 2, columns < half, columns < half + 3, columns < T - 2],
        [1, 2, 3, 4, 5],
        0,
    )
    rows = [
        (np.ones(T, int), None),
        (columns >= T // 3, None),  # padding on the left
        (columns <= T - T // 3, None),  # on the right
        (packed, None),
        (np.where(columns % 5 == 2, 0, packed), None),  # pads between and inside segments
        (tree, np.array([0, 1, 1, 1, 4, 4])[tree]),
        (np.where(columns == 1, 0, tree), np.array([0, 1, 1, 1, 4, 4])[np.where(columns == 1, 0, tree)]),
    ]
    segments = np.stack([segment for segment, _ in rows]).astype(np.int32)
    return segments, np.stack([segment if prefix is None else prefix for segment, prefix in rows]).astype(np.int32)


def inputs(T, dtype=np.float32):
    generator = np.random.default_rng(T)
    ids = layouts(T)
    B = len(ids[0])
    normal = lambda *shape: jnp.asarray(generator.normal(size=shape), dtype)
    arrays = normal(B, T, M * G, H), normal(B, T, M, H), normal(B, T, M, H)
    return arrays, ids, normal(B, T, M * G, H)


def value_and_gradient(arrays, ids, cotangent, block):
    @jax.jit
    def both(*arrays):
        value, pull = jax.vjp(lambda *x: attend(*x, *ids, block=block), *arrays)
        return value, pull(cotangent)

    return both(*arrays)


@pytest.mark.parametrize("T", [13, 16, 29, 33])
@pytest.mark.parametrize("block", [4, 7])
def test_blocks_change_neither_value_nor_gradient(T, block):
    arrays, ids, cotangent = inputs(T)
    real = ids[0] > 0
    cotangent = jnp.where(real[..., None, None], cotangent, 0)
    (expected, slopes), (got, ours) = (value_and_gradient(arrays, ids, cotangent, size) for size in (ALL, block))
    np.testing.assert_allclose(got[real], expected[real], rtol=1e-5, atol=1e-5)
    assert np.isfinite(got).all()
    for one, other in zip(ours, slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert np.abs(other).max() > 0.1


@pytest.mark.parametrize("block", [4, ALL], ids=["blocks", "at once"])
def test_it_is_attention_to_segment_and_prefix_up_to_the_own_column(monkeypatch, block):
    monkeypatch.setattr(attention, "LEAST_PART", 4)
    T = 17
    arrays, (segment, prefix), _ = inputs(T)
    got = attend(*arrays, segment, prefix, block=block)
    query, key, value = map(np.asarray, arrays)
    for b, t in np.argwhere(segment > 0):
        seen = ((segment[b] == segment[b, t]) | (segment[b] == prefix[b, t])) & (np.arange(T) <= t)
        for n in range(M * G):
            scores = key[b, seen, n // G] @ query[b, t, n] / 2
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ value[b, seen, n // G]
            np.testing.assert_allclose(got[b, t, n], expected, rtol=1e-4, atol=1e-5)


def test_blocks_that_no_query_sees_are_left_out():
    """NaN keys of another prompt's block reach nobody, since nothing is computed from them."""
    block, T = 4, 16
    segment = np.repeat([[1, 2, 3, 4]], 4, axis=1).reshape(1, T)
    prefix = np.array([0, 1, 1, 3, 3])[segment]
    arrays, _, cotangent = inputs(T)
    query, key, value = (x[:1] for x in arrays)
    broken = key.at[:, :8].set(jnp.nan)
    got, slopes = value_and_gradient((query, broken, value), (segment, prefix), cotangent[:1].at[:, :8].set(0), block)
    expected, _ = value_and_gradient((query, key, value), (segment, prefix), cotangent[:1], block)
    np.testing.assert_array_equal(got[:, 8:], expected[:, 8:])
    assert np.isfinite(np.asarray(slopes[0])[:, 8:]).all()


def test_bfloat16_is_summed_in_float32():
    arrays, ids, _ = inputs(64)
    exact = attend(*arrays, *ids, block=ALL)
    rounded = attend(*(x.astype(jnp.bfloat16) for x in arrays), *ids, block=8)
    assert rounded.dtype == jnp.bfloat16
    real = ids[0] > 0
    assert np.abs(rounded.astype(jnp.float32) - exact)[real].mean() < 1e-2


@pytest.mark.parametrize("name", ["qwen3", pytest.param("minimax", marks=pytest.mark.slow)])
def test_models_compute_by_blocks_what_they_compute_at_once(monkeypatch, name):
    """Packed rows through `hidden_states`, with and without prefixes; rematerialised, with the gradient of every leaf."""
    config = debug_run.FAMILIES["minimax"] if name == "minimax" else debug_run.TINY
    model = debug_run.model(config)
    segments, prefixes = layouts(21)
    tokens = np.random.default_rng(0).integers(0, 17, segments.shape)

    def loss(model):
        total = 0
        for options in (
            {},
            {"prefix_ids_BT": prefixes, "positions_BT": np.broadcast_to(np.arange(21), segments.shape)},
        ):
            hidden = models.hidden_states(model, tokens, segment_ids_BT=segments, remat="full", **options).hidden_BTD
            total += jnp.sum(jnp.where(segments[..., None] > 0, hidden, 0) ** 3)
        return total

    results = []
    for block in (ALL, 4):
        monkeypatch.setattr(attention, "attend", functools.partial(attend, block=block))
        results.append(jax.jit(jax.value_and_grad(loss))(model))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-3), *results)


def test_memory_grows_linearly_with_the_length():
    def temporary(T):
        queries, keys = (jax.ShapeDtypeStruct((1, T, heads, 8), jnp.float32) for heads in (4, 2))
        segments = jax.ShapeDtypeStruct((1, T), jnp.int32)
        loss = lambda *x: jnp.sum(attend(*x, block=256) ** 2)
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return gradient.lower(queries, keys, keys, segments).compile().memory_analysis().temp_size_in_bytes

    short, long, longer = map(temporary, (2048, 4096, 8192))
    assert longer - long < 2.2 * (long - short)  # quadratic would be 4 times


def test_short_rows_hold_all_scores_at_once_in_parts():
    for T, loops in ((1, False), (1000, False), (2048, True)):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, T, 2, 4), (1, T, 1, 4), (1, T, 1, 4))]
        text = jax.jit(attend).lower(*shapes, jax.ShapeDtypeStruct((1, T), jnp.int32)).as_text()
        assert ("while" in text) == loops
        assert ("x1000x1000x" in text) is False
