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


def layouts(S, T):
    """Segments [rows, S] of all columns; the last T are those of the queries."""
    columns = np.arange(S)
    packed = np.sort(np.random.default_rng(0).integers(1, 4, S))
    rows = [
        np.ones(S, int),
        columns >= S // 3,  # padding on the left
        columns <= S - S // 3,  # on the right
        packed,
        np.where(columns % 5 == 2, 0, packed),  # pads between and inside segments
        (columns < S - T - 1) | (columns >= S - T),  # a response after its prompt
    ]
    return np.stack(rows).astype(np.int32)


def inputs(S, T, dtype=np.float32):
    generator = np.random.default_rng(S + T)
    segments = layouts(S, T)
    B = len(segments)
    normal = lambda *shape: jnp.asarray(generator.normal(size=shape), dtype)
    arrays = normal(B, T, M * G, H), normal(B, S, M, H), normal(B, S, M, H)
    return arrays, (segments[:, -T:], segments), normal(B, T, M * G, H)


@pytest.mark.parametrize("S, T", [(13, 13), (16, 16), (29, 17), (29, 3), (33, 32)])
@pytest.mark.parametrize("block", [4, 7])
def test_blocks_change_neither_value_nor_gradient(S, T, block):
    assert block**2 < T * S
    arrays, segments, cotangent = inputs(S, T)
    cotangent = jnp.where((segments[0] > 0)[..., None, None], cotangent, 0)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradient(block, *arrays):
        value, pull = jax.vjp(lambda *x: attend(*x, *segments, block=block), *arrays)
        return value, pull(cotangent)

    (expected, slopes), (got, ours) = (value_and_gradient(size, *arrays) for size in (ALL, block))
    real = segments[0] > 0
    np.testing.assert_allclose(got[real], expected[real], rtol=1e-5, atol=1e-5)
    assert np.isfinite(got).all()
    for one, other in zip(ours, slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert np.abs(other).max() > 0.1


def test_it_is_attention_to_the_same_segment_up_to_the_own_column():
    arrays, (of_query, of_key), _ = inputs(12, 9)
    got = attend(*arrays, of_query, of_key, block=4)
    query, key, value = map(np.asarray, arrays)
    for b, t in np.argwhere(of_query > 0):
        seen = (of_key[b] == of_query[b, t]) & (np.arange(12) <= t + 3)
        for n in range(M * G):
            scores = key[b, seen, n // G] @ query[b, t, n] / 2
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ value[b, seen, n // G]
            np.testing.assert_allclose(got[b, t, n], expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_summed_in_float32():
    arrays, segments, _ = inputs(64, 64)
    exact = attend(*arrays, *segments, block=ALL)
    rounded = attend(*(x.astype(jnp.bfloat16) for x in arrays), *segments, block=8)
    assert rounded.dtype == jnp.bfloat16
    real = segments[0] > 0
    assert np.abs(rounded.astype(jnp.float32) - exact)[real].mean() < 1e-2


@pytest.mark.parametrize("name", ["qwen3", pytest.param("minimax", marks=pytest.mark.slow)])
def test_models_compute_by_blocks_what_they_compute_at_once(monkeypatch, name):
    """Packed rows through `hidden_states`, shared prompts through `response_states`; rematerialised, with the gradient of every leaf."""
    config = debug_run.FAMILIES["minimax"] if name == "minimax" else debug_run.TINY
    model = debug_run.model(config)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 17, (4, 21))
    segments = np.stack([np.sort(generator.integers(0, 4, 21)) for _ in range(4)])
    tokens[2:, :9] = tokens[:2, :9] = tokens[[0, 0], :9]
    padded = (np.arange(21) >= 4) & (np.arange(21) < np.array([[21], [12], [17], [21]]))

    def loss(model):
        packed = models.hidden_states(model, tokens, segment_ids_BT=segments, remat=True).hidden_BTD
        shared = models.response_states(model, tokens, padded, response_width=12, share=4, remat=True).hidden_BTD
        total = jnp.sum(jnp.where(segments[..., None] > 0, packed, 0) ** 3)
        return total + jnp.sum(jnp.where(padded[:, -12:, None], shared, 0) ** 3)

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
        return gradient.lower(queries, keys, keys, segments, segments).compile().memory_analysis().temp_size_in_bytes

    short, long, longer = map(temporary, (2048, 4096, 8192))
    assert longer - long < 2.2 * (long - short)  # quadratic would be 4 times


def test_one_token_and_short_rows_hold_all_scores_at_once():
    one, short, long = ((1, 40_000), (1000, 1000), (2048, 2048))
    for (T, S), loops in ((one, False), (short, False), (long, True)):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, T, 2, 4), (1, S, 1, 4), (1, S, 1, 4))]
        segments = [jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (T, S)]
        assert ("while" in jax.jit(attend).lower(*shapes, *segments).as_text()) == loops
