"""Lightning attention against its definition in float64, value and gradient; blocks, states, segments, memory."""

import functools

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax.models.lightning import LightningAttention, lightning_attention, slopes

BLOCK, N, H = 16, 2, 3
SLOPES = np.array([0.25, 0.02], np.float32)
attention = jax.jit(lightning_attention, static_argnames="block")


def quadratic(query, key, value, segment, prefix, index):
    """Heads [T, N, H] of one row by the definition, and the weights [N, T, T] = exp(-slope (t - s)) where s is seen."""
    T = len(query)
    weights = np.zeros((N, T, T))
    for t in np.flatnonzero(segment):
        for s in range(t + 1):
            if segment[s] in (segment[t], prefix[t]) and segment[s]:
                weights[:, t, s] = np.exp(-SLOPES.astype(np.float64) * (index[t] - index[s]))
    return np.einsum("nts,tnh,snh,snk->tnk", weights, query, key, value), weights


def gradients(query, key, value, weights, cotangent):
    """Of sum(cotangent x heads), by hand."""
    return (
        np.einsum("nts,snh,snk,tnk->tnh", weights, key, value, cotangent),
        np.einsum("nts,tnh,snk,tnk->snh", weights, query, value, cotangent),
        np.einsum("nts,tnh,snh,tnk->snk", weights, query, key, cotangent),
    )


def rows_of(T, seed=0):
    """Random inputs, and layouts: plain, left-padded, right-padded, packed with pads between and inside segments, packed with prefixes."""
    generator = np.random.default_rng(seed)
    columns = np.arange(T)
    packed = np.sort(generator.integers(1, 5, T)) * (generator.random(T) < 0.8)
    third = max(1, T // 3)
    tree = np.select(
        [columns < third, columns < third + 2, columns < 2 * third, columns < 2 * third + 4, columns < T - 1],
        [1, 2, 3, 4, 5],
        0,
    )
    tree[generator.random(T) < 0.1] = 0
    late = np.where(columns < T - 2, 1, 2)  # a prompt of several blocks, and what follows it
    segment = np.stack(
        [columns >= 0, columns >= T // 2, columns <= T // 2, packed, columns // 5 + 1, tree, late]
    ).astype(np.int32)
    prefix = segment.copy()
    prefix[-2] = np.array([0, 1, 1, 1, 4, 4])[tree]
    prefix[-1] = 1
    index = np.array(
        [
            [np.sum(np.isin(s[:t], [s[t], p[t]]) & (s[:t] > 0)) for t in range(T)]
            for s, p in zip(segment, prefix, strict=True)
        ]
    )
    inputs = generator.normal(size=(4, len(segment), T, N, H))
    return inputs[:3], inputs[3] * (segment > 0)[..., None, None], (segment, prefix, index.astype(np.int32))


@pytest.mark.parametrize("T", [1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_value_and_gradient_are_those_of_the_definition(T):
    (query, key, value), cotangent, ids = rows_of(T, seed=T)
    inputs = tuple(x.astype(np.float32) for x in (query, key, value))
    weighted = lambda *x: jnp.sum(lightning_attention(*x, SLOPES, *ids, block=BLOCK)[0] * cotangent.astype(np.float32))
    got = np.asarray(attention(*inputs, SLOPES, *ids, block=BLOCK)[0])
    got_gradients = jax.jit(jax.grad(weighted, argnums=(0, 1, 2)))(*inputs)
    for row in range(len(got)):
        of_row, real = (query[row], key[row], value[row]), ids[0][row] > 0
        expected, weights = quadratic(*of_row, *(x[row] for x in ids))
        np.testing.assert_allclose(got[row][real], expected[real], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(got_gradients, gradients(*of_row, weights, cotangent[row]), strict=True):
            np.testing.assert_allclose(ours[row], theirs, rtol=1e-4, atol=1e-4)
            assert not np.asarray(ours[row])[~real].any()
    assert np.isfinite(got).all()


def test_without_prefixes_one_state_is_carried_with_the_same_result():
    (query, key, value), _, (segment, _, index) = rows_of(37)
    inputs = tuple(x[:5].astype(np.float32) for x in (query, key, value))
    segment, index = segment[:5], index[:5]
    expected, got = (attention(*inputs, SLOPES, segment, x, index, block=BLOCK) for x in (segment, None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_the_state_is_that_of_the_last_segment():
    (query, key, value), _, (segment, prefix, index) = rows_of(2 * BLOCK + 3)
    inputs = tuple(x.astype(np.float32) for x in (query, key, value))
    _, last = attention(*inputs, SLOPES, segment, prefix, index, block=BLOCK)
    for row in range(len(segment)):
        end = np.flatnonzero(segment[row])[-1]
        own = segment[row] == segment[row, end]
        decay = np.exp(-SLOPES[:, None].astype(np.float64) * np.where(own, index[row, end] - index[row], 0)) * own
        expected = np.einsum("ns,snh,snk->nhk", decay, key[row], value[row])
        np.testing.assert_allclose(last[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [1, 5, 64])
def test_the_block_size_changes_nothing(block):
    (query, key, value), _, ids = rows_of(37)
    inputs = tuple(x.astype(np.float32) for x in (query, key, value))
    expected, got = (attention(*inputs, SLOPES, *ids, block=size) for size in (BLOCK, block))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_a_strong_decay_over_a_long_block_stays_finite():
    """exp(+slope x 256) is not in float32: the weights must come from differences, in the gradient too."""
    shape = (1, 300, 1, 2)
    inputs = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i in range(3)]
    ids = np.ones(shape[:2], np.int32), None, np.arange(300, dtype=np.int32)[None]
    loss = lambda *x: jnp.sum(lightning_attention(*x, np.ones(1, np.float32), *ids, block=256)[0] ** 2)
    value, gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*inputs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, gradient)))


def test_memory_grows_linearly_with_the_length():
    def temporary(T):
        shape = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        loss = lambda q, k, v, *ids: jnp.sum(lightning_attention(q, k, v, SLOPES, *ids, block=64)[0] ** 2)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, ids, ids, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 5 * temporary(2048)  # quadratic would be 16 times


def test_decay_is_slower_in_deeper_layers_and_later_heads():
    table = slopes(debug_run.FAMILIES["lightning"].__class__(9, 8, 5, 4, 2, 4, 8))
    assert table.shape == (5, 4) and table.dtype == np.float32
    np.testing.assert_allclose(table[0], [2**-2, 2**-4, 2**-6, 2**-8], rtol=2e-5)
    np.testing.assert_allclose(table[:, 0] / 2**-2, 1 - np.arange(5) / 4.00001 + 1e-5, rtol=1e-6)
    assert (table > 0).all()


def test_the_layer_computes_states_in_float32_also_in_bfloat16():
    config = debug_run.FAMILIES["lightning"]
    layer = functools.partial(LightningAttention, config)
    span = debug_run.models.layers.Span((None, None), jnp.ones((1, 5), int), None, jnp.arange(5)[None])
    run = lambda key: layer(key=key)(jnp.ones((1, 5, 16), jnp.bfloat16), span, jnp.ones(4))
    output, state = jax.eval_shape(run, jax.random.key(0))
    assert output.dtype == jnp.bfloat16 and state.dtype == jnp.float32
