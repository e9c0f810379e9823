"""The decoder against a float64 oracle in NumPy, and what padding, packing, caching and rematerialisation must not change."""

import dataclasses
import itertools
import subprocess
import sys

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import models
from cispo_jax.models import Transformer, TransformerConfig, decode_step, forward, hidden_states, prefill

PLAIN = debug_run.TINY
VARIANTS = {
    "plain": PLAIN,
    "untied": dataclasses.replace(PLAIN, tied_head=False),
    "qwen2": dataclasses.replace(PLAIN, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6),
    "qwen3": dataclasses.replace(PLAIN, qk_norm=True, tied_head=False, head_dim=6),
    "multi_head": dataclasses.replace(PLAIN, num_kv_heads=4),
    "multi_query": dataclasses.replace(PLAIN, num_kv_heads=1),
    "partial_rotary": dataclasses.replace(PLAIN, head_dim=6, rotary_dim=4),
    **debug_run.FAMILIES,
}
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]], np.int32)


FORWARD = jax.jit(forward, static_argnames="dtype")


# ---- the oracle: one row, one token, one head at a time


def oracle(model, tokens, expert_ids=None):
    """Logits [T, V] in float64 of one unpadded row; `expert_ids` [T, L, K] replaces the router's choice."""
    return oracle_of_arrays(jax.tree.map(lambda x: np.asarray(x, np.float64), model), tokens, expert_ids)


def oracle_of_arrays(w, tokens, expert_ids=None):
    config = w.config
    period = int(np.lcm(len(config.attention), len(config.mlp)))
    x = [w.embedding[...][token] for token in tokens]
    for layer in range(config.num_layers):
        block = jax.tree.map(lambda leaf, i=layer // period: leaf[i], w.layers[layer % period])
        attention, mlp = config.attention[layer % len(config.attention)], config.mlp[layer % len(config.mlp)]
        normed = [norm(row, block.attention_norm[...], config.norm_eps) for row in x]
        if attention == "softmax":
            outputs, (alpha, beta) = softmax_attention(block.attention, normed, config), config.softmax_residual
        else:
            outputs, (alpha, beta) = lightning(block.attention, normed, config, layer), config.lightning_residual
        residual = normed if config.postnorm else x
        x = [alpha * r + beta * output for r, output in zip(residual, outputs, strict=True)]
        alpha, beta = config.mlp_residual
        for t in range(len(x)):
            row = norm(x[t], block.mlp_norm[...], config.norm_eps)
            chosen = None if expert_ids is None else expert_ids[t][layer]
            output = swiglu(row, block.mlp) if mlp == "dense" else mixture(row, block.mlp, config, chosen)
            x[t] = alpha * (row if config.postnorm else x[t]) + beta * output
    head = w.embedding[...].T if config.tied_head else w.head[...]
    return np.stack([norm(row, w.final_norm[...], config.norm_eps) @ head for row in x])


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean() + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(x, position, config):
    """Pairs (i, i + R/2) of the first R dimensions turn; the others stay."""
    R = config.rotary_dim or config.head_dim
    out = x.copy()
    for i in range(R // 2):
        angle = position * config.rope_theta ** (-2 * i / R)
        out[i] = x[i] * np.cos(angle) - x[i + R // 2] * np.sin(angle)
        out[i + R // 2] = x[i + R // 2] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def softmax_attention(weights, x, config):
    group = config.num_heads // config.num_kv_heads
    queries, keys, values = [], [], []
    for t, row in enumerate(x):
        for store, name in ((queries, "query"), (keys, "key"), (values, "value")):
            part = np.tensordot(row, getattr(weights, name)[...], axes=(0, 0))  # [heads, H]
            if config.qkv_bias:
                part = part + getattr(weights, f"{name}_bias")[...]
            if config.qk_norm and name != "value":
                scale = getattr(weights, f"{name}_norm")[...]
                part = np.stack([norm(head, scale, config.norm_eps) for head in part])
            store.append(part if name == "value" else np.stack([rotate(head, t, config) for head in part]))
    outputs = []
    for t in range(len(x)):
        heads = []
        for n in range(config.num_heads):
            scores = np.array([queries[t][n] @ keys[s][n // group] for s in range(t + 1)]) / np.sqrt(config.head_dim)
            p = np.exp(scores - scores.max())
            heads.append(sum(p[s] / p.sum() * values[s][n // group] for s in range(t + 1)))
        outputs.append(np.tensordot(np.stack(heads), weights.output[...], axes=2))
    return outputs


def lightning(weights, x, config, layer):
    N, outputs = config.num_heads, []
    query, key, value = (
        [silu(np.tensordot(row, w[...], axes=(0, 0))) for row in x] for w in (weights.query, weights.key, weights.value)
    )
    for t, row in enumerate(x):
        heads = np.zeros((N, config.head_dim))
        for n in range(N):
            slope = 2 ** (-8 * (n + 1) / N) * (1 - layer / (config.num_layers - 1 + 1e-5) + 1e-5)
            for s in range(t + 1):
                heads[n] += np.exp(-slope * (t - s)) * (query[t][n] @ key[s][n]) * value[s][n]
        gate = 1 / (1 + np.exp(-np.tensordot(row, weights.gate[...], axes=(0, 0))))
        outputs.append(np.tensordot(gate * norm(heads, weights.norm[...], 1e-6), weights.output[...], axes=2))
    return outputs


def swiglu(row, mlp):
    return (silu(row @ mlp.gate[...]) * (row @ mlp.up[...])) @ mlp.down[...]


def mixture(row, mlp, config, chosen):
    logits = row @ mlp.router[...]
    probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    if chosen is None:
        chosen = np.argsort(-probs)[: config.experts_per_token]
    gates = probs[chosen] / (probs[chosen].sum() if config.normalize_gates else 1)
    expert = lambda e: jax.tree.map(
        lambda leaf: leaf[e], {name: getattr(mlp, name)[...] for name in ("gate", "up", "down")}
    )
    total = 0
    for gate, e in zip(gates, chosen, strict=True):
        w = expert(e)
        total = total + gate * (silu(row @ w["gate"]) * (row @ w["up"])) @ w["down"]
    return total


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_is_the_oracles(name):
    model = debug_run.model(VARIANTS[name])
    logits = FORWARD(model, TOKENS)
    assert logits.dtype == jnp.float32
    expected = np.stack([oracle(model, row) for row in TOKENS])
    assert np.abs(expected).max() > 1  # the comparison means something
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["qwen3_moe", "minimax"])
def test_the_gradient_is_the_oracles(name):
    """Each leaf along a random direction, against central differences of the float64 oracle."""
    model, generator = debug_run.model(VARIANTS[name]), np.random.default_rng(0)
    weights = generator.normal(size=(TOKENS.shape[1], PLAIN.vocab_size))
    gradient = jax.jit(jax.grad(lambda m: jnp.sum(forward(m, TOKENS[:1])[0] * weights.astype(np.float32))))(model)
    leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), model))
    paths = jax.tree_util.tree_leaves_with_path(gradient)
    for i, (path, leaf) in enumerate(paths):
        direction = generator.normal(size=leaf.shape)
        loss = lambda step: np.sum(
            oracle_of_arrays(
                treedef.unflatten([*leaves[:i], leaves[i] + step * direction, *leaves[i + 1 :]]), TOKENS[0]
            )
            * weights
        )
        slope, got = (loss(1e-5) - loss(-1e-5)) / 2e-5, np.sum(np.asarray(leaf, np.float64) * direction)
        np.testing.assert_allclose(
            got, slope, rtol=1e-3, atol=2e-4 * np.linalg.norm(leaf), err_msg=jax.tree_util.keystr(path)
        )
        assert np.abs(leaf).max() > 0


def shapes(config):
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0))))
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    return {name(path): leaf.shape for path, leaf in leaves}


def test_parameters_have_the_documented_names_and_shapes():
    config = TransformerConfig(11, 8, 3, 4, 2, 6, 10, tied_head=False, qkv_bias=True, qk_norm=True)
    assert shapes(config) == {
        "embedding": (11, 8),
        "final_norm": (8,),
        "head": (8, 11),
        "layers.0.attention_norm": (3, 8),
        "layers.0.mlp_norm": (3, 8),
        "layers.0.attention.query": (3, 8, 4, 6),
        "layers.0.attention.key": (3, 8, 2, 6),
        "layers.0.attention.value": (3, 8, 2, 6),
        "layers.0.attention.output": (3, 4, 6, 8),
        "layers.0.attention.query_bias": (3, 4, 6),
        "layers.0.attention.key_bias": (3, 2, 6),
        "layers.0.attention.value_bias": (3, 2, 6),
        "layers.0.attention.query_norm": (3, 6),
        "layers.0.attention.key_norm": (3, 6),
        "layers.0.mlp.gate": (3, 8, 10),
        "layers.0.mlp.up": (3, 8, 10),
        "layers.0.mlp.down": (3, 10, 8),
    }


def test_each_place_of_the_period_has_its_stack():
    config = TransformerConfig(
        11,
        8,
        6,
        4,
        2,
        6,
        10,
        attention=("softmax", "lightning"),
        mlp=("moe",),
        num_experts=5,
        experts_per_token=2,
        expert_dim=7,
    )
    moe = {"router": (3, 8, 5), "gate": (3, 5, 8, 7), "up": (3, 5, 8, 7), "down": (3, 5, 7, 8)}
    softmax = {"query": (3, 8, 4, 6), "key": (3, 8, 2, 6), "value": (3, 8, 2, 6), "output": (3, 4, 6, 8)}
    lightning = dict.fromkeys(("query", "key", "value", "gate"), (3, 8, 4, 6))
    lightning |= {"norm": (3, 4, 6), "output": (3, 4, 6, 8)}
    expected = {"embedding": (11, 8), "final_norm": (8,)}
    for place, attention in enumerate((softmax, lightning)):
        expected |= {f"layers.{place}.{norm}": (3, 8) for norm in ("attention_norm", "mlp_norm")}
        expected |= {f"layers.{place}.attention.{name}": shape for name, shape in attention.items()}
        expected |= {f"layers.{place}.mlp.{name}": shape for name, shape in moe.items()}
    assert shapes(config) == expected


COUNTS = {  # parameters, and how many of them a token meets
    "smollm2-135m": (134_515_008, 134_515_008),
    "qwen2.5-0.5b": (494_032_768, 494_032_768),
    "qwen2.5-1.5b": (1_543_714_304, 1_543_714_304),
    "qwen2.5-7b": (7_615_616_512, 7_615_616_512),
    "qwen2.5-32b": (32_763_876_352, 32_763_876_352),
    "qwen3-0.6b": (596_049_920, 596_049_920),
    "qwen3-1.7b": (1_720_574_976, 1_720_574_976),
    "qwen3-8b": (8_190_735_360, 8_190_735_360),
    "qwen3-32b": (32_762_123_264, 32_762_123_264),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "minimax-m1": (456_089_655_296, 48_403_306_496),
    "debug": (19_616, 19_616),
    "tiny": (992_384, 992_384),
    "tiny-moe": (3_355_776, 996_480),
    "small": (3_332_544, 3_332_544),
}


@pytest.mark.parametrize("name", models.PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    """From the shapes alone: half a trillion parameters cost nothing to count."""
    counts = models.count_parameters(models.PRESETS[name])
    assert counts[:2] == COUNTS[name]
    abstract = jax.eval_shape(lambda: Transformer(models.PRESETS[name], key=jax.random.key(0)))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(abstract))


def test_active_parameters_are_those_that_are_published():
    """M1's 45.9B leave embedding and head out, Qwen's 3.3B do not."""
    m1, qwen = (models.count_parameters(models.PRESETS[name]) for name in ("minimax-m1", "qwen3-30b-a3b"))
    assert m1.embeddings == 2 * 200_064 * 6_144 and round((m1.active - m1.embeddings) / 1e9, 1) == 45.9
    assert qwen.embeddings == 2 * 151_936 * 2_048 and 3.3e9 < qwen.active < 3.4e9
    smollm2 = models.count_parameters(models.PRESETS["smollm2-135m"])
    assert smollm2.embeddings == 49_152 * 576  # tied: once


def test_layers_start_from_different_weights():
    layers = jax.jit(lambda: Transformer(PLAIN, key=jax.random.key(0)))().layers[0]
    for leaf in (layers.attention.query, layers.attention.output, layers.mlp.up):
        assert not np.array_equal(leaf[...][0], leaf[...][1])
    assert not np.array_equal(layers.mlp.gate[...], layers.mlp.up[...])


@pytest.mark.parametrize(
    "wrong",
    [
        dict(num_kv_heads=3),
        dict(rotary_dim=3),
        dict(rotary_dim=6),
        dict(attention=("linear",)),
        dict(num_layers=3, attention=("softmax", "lightning")),
        dict(experts_per_token=3, num_experts=2, mlp=("moe",)),
    ],
)
def test_an_architecture_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(PLAIN, **wrong)


# ---- causality, padding, packing


@pytest.fixture(scope="module")
def qwen():
    return debug_run.model(VARIANTS["qwen3"])


@pytest.fixture(scope="module", params=["qwen3", pytest.param("minimax", marks=pytest.mark.slow)])
def model(request):
    """Both kinds of attention and both of feed-forward."""
    return debug_run.model(VARIANTS[request.param])


def test_no_gradient_flows_back_from_later_tokens(model):
    """The logits at t do not depend on what is embedded after t; they do on what is at and before t."""
    row = TOKENS[:1]

    def logits_at(embedding, t):
        changed = jax.tree.map(lambda x: x, model)
        changed.embedding = type(model.embedding)(embedding)
        return jnp.sum(forward(changed, row)[0, t] * jnp.arange(1.0, PLAIN.vocab_size + 1))

    for t in (0, 3):
        gradient = np.asarray(jax.jit(jax.grad(logits_at))(model.embedding[...], t))  # untied head: only inputs matter
        seen = np.abs(gradient).max(axis=1) > 0
        assert set(np.flatnonzero(seen)) == set(row[0, : t + 1].tolist())


def pad(rows, width, side, filler=0):
    tokens, mask = np.full((len(rows), width), filler, np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, where], mask[i, where] = row, True
    return tokens, mask


ROWS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [7, 8, 9, 3]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filler", [0, 5])  # a pad may have the id of a real token
def test_padding_changes_nothing(model, side, filler):
    tokens, mask = pad(ROWS, 9, side, filler)
    logits = np.asarray(FORWARD(model, tokens, mask))
    assert np.isfinite(logits).all()  # pads too: they are masked later, and 0 * NaN is NaN
    for i, row in enumerate(ROWS):
        np.testing.assert_allclose(logits[i][mask[i]], oracle(model, row), rtol=1e-5, atol=5e-5)


def test_padding_that_is_part_of_the_gradient_stays_finite(model):
    tokens, mask = pad(ROWS, 9, "left")
    loss = lambda m: jnp.where(mask[..., None], forward(m, tokens, mask), 0).sum()
    gradient = jax.jit(jax.grad(loss))(model)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("ids", [(1, 2, 3), (9, 4, 6)])
def test_packed_rows_are_the_unpacked_ones(model, ids):
    """Segments never see each other and their positions restart, whatever their ids; pads may lie around them."""
    lengths = [len(row) for row in ROWS]
    packed = np.array([[0, *np.concatenate(ROWS), 0, 0]], np.int32)
    segment_ids = np.array([[0, *np.repeat(ids, lengths), 0, 0]], np.int32)
    logits = np.asarray(FORWARD(model, packed, segment_ids_BT=segment_ids))[0, 1:]
    for row, part in zip(ROWS, np.split(logits, np.cumsum(lengths)), strict=False):
        np.testing.assert_allclose(part, oracle(model, row), rtol=1e-5, atol=5e-5)


def test_the_padding_mask_applies_to_packed_rows_too(model):
    tokens, segment_ids = np.array([[3, 1, 4, 8]], np.int32), np.array([[1, 1, 1, 1]], np.int32)
    mask = np.array([[True, False, True, True]])
    logits = FORWARD(model, tokens, mask, segment_ids_BT=segment_ids)[0]
    np.testing.assert_allclose(logits[mask[0]], oracle(model, [3, 4, 8]), rtol=1e-5, atol=5e-5)


def test_nothing_crosses_from_one_segment_to_another(model):
    """The gradient of one segment's logits is exactly 0 at the others, also where a block of lightning attention holds several."""
    segment_ids = np.array([[1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]], np.int32)
    tokens = np.arange(1, 13, dtype=np.int32)[None]  # a token comes once: the embedding's rows are the positions

    def logits_of(embedding, segment):
        changed = jax.tree.map(lambda x: x, model)
        changed.embedding = type(model.embedding)(embedding)
        logits = forward(changed, tokens, segment_ids_BT=segment_ids)[0] * jnp.arange(1.0, PLAIN.vocab_size + 1)[None]
        return jnp.sum(jnp.where((segment_ids[0] == segment)[:, None], logits, 0))

    gradient = jax.jit(jax.grad(logits_of))
    for segment in (1, 2, 3):
        touched = np.abs(gradient(model.embedding[...], segment)).max(axis=1) > 0
        np.testing.assert_array_equal(touched[1:13], segment_ids[0] == segment)


def test_positions_restart_in_every_segment():
    ids = jnp.array([[0, 0, 4, 4, 4, 1, 1, 0], [2, 2, 2, 3, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(models.segment_positions(ids), expected)


def test_given_positions_are_used(qwen):
    """RoPE is relative: a shift of all positions changes nothing, a stretch does."""
    positions = np.broadcast_to(np.arange(7), TOKENS.shape)
    plain, shifted, stretched = (
        FORWARD(qwen, TOKENS, positions_BT=p) for p in (positions, positions + 50, 2 * positions)
    )
    np.testing.assert_allclose(plain, FORWARD(qwen, TOKENS), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(shifted, plain, rtol=1e-3, atol=2e-3)
    assert np.abs(stretched - plain).max() > 0.05


# ---- decoding, dtype, rematerialisation


DECODED = ["plain", "minimax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mixed"))]


@pytest.mark.parametrize("name", DECODED)
def test_decoding_with_the_cache_is_forward(name):
    """A prefill of T columns, then one token at a time, for T around lightning attention's block; a prompt's pads stay out of sight.

    For one response to each prompt, which has its columns, and for two that share them.
    """
    block = 16
    model = debug_run.model(dataclasses.replace(VARIANTS[name], lightning_block=block))
    rows = np.random.default_rng(0).integers(0, 17, (2, 3 * block + 8))
    whole = np.asarray(jax.jit(hidden_states)(model, rows).hidden_BTD)
    start = jax.jit(prefill, static_argnames=("copies", "room"))
    step = jax.jit(decode_step)
    lengths_of = (1, 7, block - 1, block, 3 * block + 5) if name == "minimax" else (7,)
    for T, copies in itertools.product(lengths_of, (1, 2)):
        lengths, room = np.array([T, T - T // 3]), 64 - T
        tokens, mask = pad([row[:length] for row, length in zip(rows, lengths, strict=True)], T, "left")
        hidden, cache = start(model, tokens, mask, copies=copies, room=room)
        assert (cache.shared is not None) == (copies > 1)
        first = cache.num_columns - room
        assert first == (0 if copies > 1 else T)
        real = np.repeat(lengths, copies)
        at = lambda t: np.repeat(whole[np.arange(2), lengths + t - 1], copies, axis=0)
        np.testing.assert_allclose(hidden, at(0), rtol=1e-5, atol=2e-5)
        for t in range(3):
            token = np.repeat(rows[np.arange(2), lengths + t], copies)
            hidden, cache = step(model, token, real + t, cache, first + t)
            np.testing.assert_allclose(hidden, at(t + 1), rtol=1e-5, atol=2e-5)
        assert cache.mask_BS.sum(axis=1).tolist() == (real * (copies == 1) + 3).tolist()


def test_a_lightning_layer_remembers_one_state_whatever_the_room():
    model = debug_run.model(VARIANTS["minimax"])
    start = lambda room: jax.eval_shape(
        lambda m: prefill(m, TOKENS, TOKENS > 0, copies=3, room=room, dtype=jnp.bfloat16), model
    )
    for room in (1, 1000):
        cache = start(room)[1]
        lightning, (keys, values) = cache.memory
        assert lightning.shape == (2, 6, 4, 4, 4) and lightning.dtype == jnp.float32
        assert keys.shape == values.shape == (2, 6, room, 2, 4) and keys.dtype == jnp.bfloat16
        none, (keys, values) = cache.shared.memory
        assert none is None and keys.shape == values.shape == (2, 2, 7, 2, 4)


def test_bfloat16_computes_close_to_float32_and_ends_in_float32(qwen):
    exact = FORWARD(qwen, TOKENS)
    rounded = FORWARD(qwen, TOKENS, dtype=jnp.bfloat16)
    assert rounded.dtype == jnp.float32
    assert jax.eval_shape(lambda m: hidden_states(m, TOKENS, dtype=jnp.bfloat16), qwen).hidden_BTD.dtype == jnp.bfloat16
    error = np.abs(rounded - exact).mean() / np.abs(exact).mean()
    assert 1e-4 < error < 3e-2


@pytest.mark.parametrize("remat", ["full", "attention"])
def test_rematerialisation_changes_no_gradient(qwen, remat):
    loss = lambda m, remat: jnp.sum(hidden_states(m, TOKENS, remat=remat).hidden_BTD ** 2)
    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(qwen, remat) for remat in ("off", remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), plain, again)
    jaxpr = lambda remat: str(jax.make_jaxpr(jax.grad(lambda m: loss(m, remat)))(qwen))
    assert "remat" in jaxpr(remat) and "remat" not in jaxpr("off")


def test_each_policy_of_rematerialisation_keeps_less_than_the_one_before(qwen):
    def kept(remat):
        gradient = jax.grad(lambda m: jnp.sum(hidden_states(m, TOKENS, remat=remat).hidden_BTD ** 2))
        return len(str(jax.make_jaxpr(gradient)(qwen)).split("dot_general"))

    assert kept("off") < kept("attention") < kept("full")  # products in the program: those that are computed again


def test_forward_runs_without_jit(model):
    with jax.disable_jit():
        slow = forward(model, TOKENS[:1, :2])
    np.testing.assert_allclose(slow[0], oracle(model, TOKENS[0, :2]), rtol=1e-5, atol=5e-5)


def test_models_build_without_a_mesh_and_import_quietly():
    code = "import jax, cispo_jax.models; print(jax._src.xla_bridge.backends_are_initialized())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
