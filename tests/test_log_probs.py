import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cispo_jax import fused_token_log_probs, head_logits, token_log_probs
from tests import oracles

D, V = 6, 37


def inputs(seed=0, shape=(3, 5), scale=1.5, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(*shape, D)).astype(dtype)
    head = (rng.normal(size=(D, V)) * scale).astype(dtype)
    return hidden, head, rng.integers(0, V, shape)


def weighted(log_probs, entropy, seed=1):
    """A scalar that uses every output with another weight."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, *log_probs.shape)).astype(np.float32)
    return jnp.sum(a * log_probs) + jnp.sum(b * entropy), (a, b)


def oracle(hidden, head, tokens, temperature):
    """Values and gradients of `weighted` in float64."""
    flat = hidden.reshape(-1, D).astype(np.float64)
    logits = flat @ head.astype(np.float64) / temperature
    log_probs, entropy, d_log_probs, d_entropy = oracles.token_log_probs(logits, tokens.ravel())
    _, (a, b) = weighted(log_probs.reshape(tokens.shape), entropy.reshape(tokens.shape))
    d_logits = (a.reshape(-1, 1) * d_log_probs + b.reshape(-1, 1) * d_entropy) / temperature
    gradients = (d_logits @ head.T.astype(np.float64)).reshape(hidden.shape), flat.T @ d_logits
    return log_probs.reshape(tokens.shape), entropy.reshape(tokens.shape), gradients


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 15, 100])
def test_fused_agrees_with_float64_oracle(temperature, chunk_size):
    hidden, head, tokens = inputs()
    log_probs, entropy, gradients = oracle(hidden, head, tokens, temperature)
    fused = functools.partial(fused_token_log_probs, tokens=tokens, temperature=temperature, chunk_size=chunk_size)
    outputs = jax.jit(fused)(hidden, head)
    np.testing.assert_allclose(outputs[0], log_probs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[1], entropy, rtol=1e-5, atol=1e-6)
    assert outputs[0].dtype == outputs[1].dtype == jnp.float32
    actual = jax.jit(jax.grad(lambda h, w: weighted(*fused(h, w))[0], argnums=(0, 1)))(hidden, head)
    for got, expected in zip(actual, gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@functools.cache
def compiled_with_chunks_of(chunk_size):
    loss = lambda h, w, t: weighted(*fused_token_log_probs(h, w, t, chunk_size=chunk_size))[0]
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@given(seed=st.integers(0, 10**6), chunk_size=st.sampled_from([1, 2, 7, 14]), order=st.permutations(range(15)))
@settings(max_examples=20, deadline=None)
def test_chunk_size_and_order_of_tokens_change_nothing(seed, chunk_size, order):
    hidden, head, tokens = inputs(seed, (15,))
    expected, (d_hidden, d_head) = compiled_with_chunks_of(15)(hidden, head, tokens)
    value, gradients = compiled_with_chunks_of(chunk_size)(hidden, head, tokens)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], d_head, rtol=1e-4, atol=1e-5)
    outputs = jax.jit(fused_token_log_probs)(hidden, head, tokens)
    moved = jax.jit(fused_token_log_probs)(hidden[np.array(order)], head, tokens[np.array(order)])
    for got, whole in zip(moved, outputs, strict=True):
        np.testing.assert_allclose(got, whole[np.array(order)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0, 5), (4, 0)])
def test_any_leading_shape(shape):
    hidden, head, tokens = inputs(2, shape)
    log_probs, entropy = fused_token_log_probs(hidden, head, tokens, chunk_size=3)
    assert log_probs.shape == entropy.shape == shape
    np.testing.assert_allclose(
        log_probs, token_log_probs(head_logits(*map(jnp.asarray, (hidden, head))), tokens), rtol=1e-5
    )
    gradient = jax.grad(lambda h: fused_token_log_probs(h, head, tokens, chunk_size=3)[0].sum())(hidden)
    assert gradient.shape == hidden.shape


def test_equals_the_naive_path_for_a_tied_embedding():
    hidden, head, tokens = inputs(3)
    embedding = np.ascontiguousarray(head.T)
    naive = lambda h, e: (token_log_probs(head_logits(h, e.T), tokens, 0.7) ** 2).sum()
    fused = lambda h, e: (fused_token_log_probs(h, e.T, tokens, temperature=0.7, chunk_size=4)[0] ** 2).sum()
    expected = jax.jit(jax.value_and_grad(naive, argnums=(0, 1)))(jnp.asarray(hidden), jnp.asarray(embedding))
    actual = jax.jit(jax.value_and_grad(fused, argnums=(0, 1)))(hidden, embedding)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)


def test_large_logits_and_certain_tokens_stay_finite():
    hidden, head, tokens = inputs(4, scale=300.0)
    loss = lambda h: weighted(*fused_token_log_probs(h, head, tokens, chunk_size=4))[0]
    value, gradient = jax.value_and_grad(loss)(hidden)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    entropy = fused_token_log_probs(hidden, head, tokens)[1]
    np.testing.assert_allclose(entropy, oracle(hidden, head, tokens, 1.0)[1], rtol=1e-3, atol=1e-6)
    uniform = fused_token_log_probs(np.zeros_like(hidden), head, tokens)
    np.testing.assert_allclose(uniform[0], -np.log(V), rtol=1e-6)
    np.testing.assert_allclose(uniform[1], np.log(V), rtol=1e-6)


def test_precision_of_the_head_product():
    """float32 for real: HIGHEST; two bfloat16 inputs are multiplied as they are, with a float32 sum; a mix is float32."""
    f32, bf16 = jnp.zeros((2, D)), jnp.zeros((2, D), jnp.bfloat16)
    head32, head16 = jnp.zeros((D, V)), jnp.zeros((D, V), jnp.bfloat16)
    for hidden, head, operand in ((f32, head32, "float32"), (bf16, head32, "float32"), (bf16, head16, "bfloat16")):
        (product,) = [e for e in jax.make_jaxpr(head_logits)(hidden, head).eqns if e.primitive.name == "dot_general"]
        assert {v.aval.dtype for v in product.invars} == {jnp.dtype(operand)}
        assert product.outvars[0].aval.dtype == jnp.float32
        assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}
    jaxpr = str(
        jax.make_jaxpr(jax.grad(lambda h, w: fused_token_log_probs(h, w, np.zeros(2, int))[0].sum(), argnums=(0, 1)))(
            f32, head32
        )
    )
    assert jaxpr.count("dot_general") == jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") + jaxpr.count(
        "precision=Precision.HIGHEST"
    )


def test_bfloat16_sums_in_float32_and_keeps_dtypes():
    hidden, head, tokens = inputs(5)
    hidden, head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    exact = fused_token_log_probs(hidden.astype(jnp.float32), head.astype(jnp.float32), tokens)
    for got, expected in zip(fused_token_log_probs(hidden, head, tokens), exact, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    loss = lambda h, w: weighted(*fused_token_log_probs(h, w, tokens, chunk_size=4))[0]
    gradients = jax.grad(loss, argnums=(0, 1))(hidden, head)
    exact = jax.grad(loss, argnums=(0, 1))(hidden.astype(jnp.float32), head.astype(jnp.float32))
    for got, expected in zip(gradients, exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            got.astype(jnp.float32), expected, rtol=0.05, atol=0.02 * float(jnp.abs(expected).max())
        )
    mixed = jax.grad(loss, argnums=(0, 1))(hidden, head.astype(jnp.float32))
    assert [g.dtype for g in mixed] == [jnp.bfloat16, jnp.float32]


def test_memory_is_a_tenth_of_the_naive_one():
    """4,096 tokens, D = 256, V = 50,000, forward and backward, by the compiler's own account; nothing is run."""
    n, d, v = 4096, 256, 50_000

    def naive(hidden, head, tokens):
        log_p = jax.nn.log_softmax(head_logits(hidden, head))
        return jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    def temp_bytes(token_log_probs):
        def loss(hidden, head, tokens):
            log_probs, entropy = token_log_probs(hidden, head, tokens)
            return jnp.sum(log_probs) + 0.01 * jnp.mean(entropy)

        shapes = [
            jax.ShapeDtypeStruct(s, t) for s, t in (((n, d), jnp.float32), ((d, v), jnp.float32), ((n,), jnp.int32))
        ]
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(fused_token_log_probs) < temp_bytes(naive) / 10


def test_sharded_over_the_batch_equals_unsharded_without_gathering_the_tokens():
    """A chunk holds tokens of every device, so the scan over chunks moves no hidden state between them."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    rng = np.random.default_rng(6)
    hidden, head = rng.normal(size=(8, 16, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    tokens = rng.integers(0, V, (8, 16))
    loss = lambda h, w, t: weighted(*fused_token_log_probs(h, w, t, chunk_size=32))[0]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    expected = step(hidden, head, tokens)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.device_put(hidden, rows), jax.device_put(head, everywhere), jax.device_put(tokens, rows)
    actual = jax.block_until_ready(step(*placed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)
    text = step.lower(*placed).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text


def test_report_temperature_on_both_sides():
    """TRL #4159: logits [2, 1, 0], token 0, sampled at T = 0.5: -0.142932, not the untempered -0.407606."""
    logits = jnp.array([2.0, 1.0, 0.0])
    assert token_log_probs(logits, 0, 0.5) == pytest.approx(-0.142932, abs=1e-6)
    assert token_log_probs(logits, 0) == pytest.approx(-0.407606, abs=1e-6)
    fused = fused_token_log_probs(jnp.ones((1, 1)), logits[None], jnp.zeros(1, int), temperature=0.5)
    assert fused[0][0] == pytest.approx(-0.142932, abs=1e-6)
    assert jnp.exp(token_log_probs(logits, 0) - token_log_probs(logits, 0, 0.5)) == pytest.approx(0.767, abs=1e-3)


def test_token_log_probs_value_gradient_and_dtype():
    rng = np.random.default_rng(7)
    logits, tokens = (rng.normal(size=(3, 4, V)) * 4).astype(np.float32), rng.integers(0, V, (3, 4))
    expected, _, gradient, _ = oracles.token_log_probs(logits.reshape(-1, V), tokens.ravel())
    value, actual = jax.value_and_grad(lambda x: token_log_probs(x, tokens).sum())(logits)
    assert value == pytest.approx(expected.sum(), rel=1e-5)
    np.testing.assert_allclose(actual.reshape(-1, V), gradient, rtol=1e-5, atol=1e-6)
    half = token_log_probs(jnp.asarray(logits, jnp.bfloat16), tokens)
    assert half.dtype == jnp.float32
    masked_vocabulary = logits.copy()
    masked_vocabulary[..., -1] = -np.inf
    assert np.isfinite(token_log_probs(masked_vocabulary, tokens * 0)).all()


def test_logits_far_from_zero_keep_their_digits():
    """Log-probs do not change when all logits move; 1e4 and a logsumexp of 1e4 would cancel to three digits."""
    rng = np.random.default_rng(9)
    near, tokens = rng.integers(-8, 8, (6, V)).astype(np.float32), rng.integers(0, V, 6)
    for far in (-1e4, 1e4):
        np.testing.assert_allclose(token_log_probs(near + far, tokens), token_log_probs(near, tokens), rtol=1e-6)
        # One hidden state of 1 and the logits as the head; V = 37 in 6 blocks leaves columns that are no token's.
        fused = lambda head: weighted(*fused_token_log_probs(jnp.ones((6, 1)), head, tokens, chunk_size=1))[0]
        moved, expected = jax.grad(fused)(near[:1] + far), jax.grad(fused)(near[:1])
        np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-6)
        hidden = jnp.ones((6, 1))
        fused = lambda h, head: weighted(*fused_token_log_probs(h, head, tokens, chunk_size=1))[0]
        assert np.isfinite(jax.grad(fused)(hidden, near[:1] + far)).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int32"])
def test_tokens_of_any_integer_type(dtype):
    rng = np.random.default_rng(10)
    hidden, head = rng.normal(size=(6, 2)).astype(np.float32), rng.normal(size=(2, 300)).astype(np.float32)
    tokens = rng.integers(0, 100, 6)
    gradient = jax.grad(lambda h, w, t: weighted(*fused_token_log_probs(h, w, t, chunk_size=2))[0], argnums=(0, 1))
    chex.assert_trees_all_equal(gradient(hidden, head, tokens.astype(dtype)), gradient(hidden, head, tokens))


def test_gradients_inside_shard_map():
    """Rows on four devices, the head on all: its gradient is the sum over devices, whether `grad` is outside or inside."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("jax.shard_map is not there before jax 0.8; the losses alone run on it")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shared = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    hidden, head, tokens = inputs(11, (12,))
    weights = np.random.default_rng(12).normal(size=12).astype(np.float32)

    def loss(hidden, head, tokens, weights):
        log_probs, entropy = fused_token_log_probs(hidden, head, tokens, chunk_size=2)
        return jnp.sum(weights * (log_probs + 0.3 * entropy))

    arrays = (hidden, head, tokens, weights)
    specs = (rows, shared, rows, rows)
    total = lambda *local: jax.lax.psum(loss(*local), "data")
    outside = jax.jit(jax.grad(jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=shared), argnums=(0, 1)))
    inside = jax.jit(jax.shard_map(jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=specs, out_specs=(rows, shared)))
    expected = jax.grad(loss, argnums=(0, 1))(*arrays)
    for gradients in (outside(*arrays), inside(*arrays)):
        chex.assert_trees_all_close(jax.device_get(gradients), jax.device_get(expected), rtol=1e-5, atol=1e-6)


def test_traced_temperature_and_no_gradient_to_it():
    hidden, head, tokens = inputs(8)
    fused = lambda t: fused_token_log_probs(hidden, head, tokens, temperature=t)[0].sum()
    assert jax.jit(fused)(0.8) == pytest.approx(float(fused(0.8)), rel=1e-5)
    assert jax.grad(fused)(0.8) == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; valid: a number > 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": np.ones(2)}, "temperature is .*; valid: a number > 0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5; valid: an integer > 0"),
        ({"chunk_size": None}, "chunk_size is None"),
        ({"tokens": np.zeros((3, 4), int)}, "tokens must have the leading shape .3, 5."),
        ({"tokens": np.zeros((3, 5))}, "tokens must be integers"),
        ({"head": np.zeros((V, D), np.float32)}, "head must be .D, V. with D = 6"),
    ],
)
def test_bad_input_is_refused(arguments, match):
    hidden, head, tokens = inputs()
    with pytest.raises(ValueError, match=match):
        fused_token_log_probs(**({"hidden": hidden, "head": head, "tokens": tokens} | arguments))
    if "temperature" in arguments or "tokens" in arguments:
        arguments = {"logits": np.zeros((3, 5, V)), "tokens": tokens} | arguments
        with pytest.raises(ValueError, match=match):
            token_log_probs(**arguments)
