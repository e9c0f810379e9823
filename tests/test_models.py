"""The decoder against a float64 oracle in NumPy, and what padding, packing, caching and rematerialisation must not change."""

import dataclasses
import subprocess
import sys

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import models
from cispo_jax.models import Cache, Transformer, TransformerConfig, decode_step, forward, hidden_states

PLAIN = debug_run.TINY
VARIANTS = {
    "plain": PLAIN,
    "untied": dataclasses.replace(PLAIN, tied_head=False),
    "qwen2": dataclasses.replace(PLAIN, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6),
    "qwen3": dataclasses.replace(PLAIN, qk_norm=True, tied_head=False, head_dim=6),
    "multi_head": dataclasses.replace(PLAIN, num_kv_heads=4),
    "multi_query": dataclasses.replace(PLAIN, num_kv_heads=1),
}
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]], np.int32)


FORWARD = jax.jit(forward, static_argnames="dtype")


# ---- the oracle: one row, one token, one head at a time


def oracle(model, tokens):
    """Logits [T, V] in float64 of one unpadded row."""
    config = model.config
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), model)
    norm = lambda x, scale: x / np.sqrt((x**2).mean() + config.norm_eps) * scale[...]
    H, group = config.head_dim, config.num_heads // config.num_kv_heads

    def rotate(x, position):
        out = np.zeros(H)
        for i in range(H // 2):
            angle = position * config.rope_theta ** (-2 * i / H)
            out[i] = x[i] * np.cos(angle) - x[i + H // 2] * np.sin(angle)
            out[i + H // 2] = x[i + H // 2] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    x = [w.embedding[...][token] for token in tokens]
    attention, mlp = w.layers.attention, w.layers.mlp
    for layer in range(config.num_layers):
        queries, keys, values = [], [], []
        for t, row in enumerate(x):
            row = norm(row, w.layers.attention_norm[...][layer])
            parts = []
            for name in ("query", "key", "value"):
                part = np.tensordot(row, getattr(attention, name)[...][layer], axes=(0, 0))  # [heads, H]
                if config.qkv_bias:
                    part = part + getattr(attention, f"{name}_bias")[...][layer]
                if config.qk_norm and name != "value":
                    part = np.stack([norm(head, getattr(attention, f"{name}_norm")[...][layer]) for head in part])
                parts.append(part if name == "value" else np.stack([rotate(head, t) for head in part]))
            for store, part in zip((queries, keys, values), parts, strict=True):
                store.append(part)
        for t in range(len(x)):
            heads = []
            for n in range(config.num_heads):
                scores = np.array([queries[t][n] @ keys[s][n // group] / np.sqrt(H) for s in range(t + 1)])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                heads.append(sum(weights[s] * values[s][n // group] for s in range(t + 1)))
            x[t] = x[t] + np.tensordot(np.stack(heads), attention.output[...][layer], axes=2)
        for t in range(len(x)):
            row = norm(x[t], w.layers.mlp_norm[...][layer])
            gate = row @ mlp.gate[...][layer]
            x[t] = x[t] + (gate / (1 + np.exp(-gate)) * (row @ mlp.up[...][layer])) @ mlp.down[...][layer]
    head = w.embedding[...].T if config.tied_head else w.head[...]
    return np.stack([norm(row, w.final_norm) @ head for row in x])


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_is_the_oracles(name):
    model = debug_run.model(VARIANTS[name])
    logits = FORWARD(model, TOKENS)
    assert logits.dtype == jnp.float32
    expected = np.stack([oracle(model, row) for row in TOKENS])
    assert np.abs(expected).max() > 1  # the comparison means something
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=1e-5 * np.abs(expected).max())


def test_parameters_have_the_documented_names_and_shapes():
    config = TransformerConfig(11, 8, 3, 4, 2, 6, 10, tied_head=False, qkv_bias=True, qk_norm=True)
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0))))
    shapes = {
        jax.tree_util.keystr(path).replace("'", "").replace("[", ".").replace("]", ""): x.shape for path, x in leaves
    }
    shapes = {
        name.strip(".").removesuffix(".value").removesuffix(".get_value()"): shape for name, shape in shapes.items()
    }
    assert {name.replace("..", "."): shape for name, shape in shapes.items()} == {
        "embedding": (11, 8),
        "final_norm": (8,),
        "head": (8, 11),
        "layers.attention_norm": (3, 8),
        "layers.mlp_norm": (3, 8),
        "layers.attention.query": (3, 8, 4, 6),
        "layers.attention.key": (3, 8, 2, 6),
        "layers.attention.value": (3, 8, 2, 6),
        "layers.attention.output": (3, 4, 6, 8),
        "layers.attention.query_bias": (3, 4, 6),
        "layers.attention.key_bias": (3, 2, 6),
        "layers.attention.value_bias": (3, 2, 6),
        "layers.attention.query_norm": (3, 6),
        "layers.attention.key_norm": (3, 6),
        "layers.mlp.gate": (3, 8, 10),
        "layers.mlp.up": (3, 8, 10),
        "layers.mlp.down": (3, 10, 8),
    }


@pytest.mark.parametrize("name", models.PRESETS)
def test_presets_build_without_memory(name):
    abstract = jax.eval_shape(lambda: Transformer(models.PRESETS[name], key=jax.random.key(0)))
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(abstract))
    about = {"debug": 20e3, "tiny": 1e6, "small": 3e6, "smollm2-135m": 134.5e6}[name]
    assert about / 1.4 < count < about * 1.4, count
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(abstract))


def test_layers_start_from_different_weights():
    layers = jax.jit(lambda: Transformer(PLAIN, key=jax.random.key(0)))().layers
    for leaf in (layers.attention.query, layers.attention.output, layers.mlp.up):
        assert not np.array_equal(leaf[...][0], leaf[...][1])
    assert not np.array_equal(layers.mlp.gate[...], layers.mlp.up[...])


@pytest.mark.parametrize("wrong", [dict(num_kv_heads=3), dict(head_dim=5)])
def test_an_architecture_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(PLAIN, **wrong)


# ---- causality, padding, packing


@pytest.fixture(scope="module")
def qwen():
    return debug_run.model(VARIANTS["qwen3"])


def test_no_gradient_flows_back_from_later_tokens(qwen):
    """The logits at t do not depend on what is embedded after t; they do on what is at and before t."""
    row = TOKENS[:1]

    def logits_at(embedding, t):
        changed = jax.tree.map(lambda x: x, qwen)
        changed.embedding = type(qwen.embedding)(embedding)
        return jnp.sum(forward(changed, row)[0, t] * jnp.arange(1.0, PLAIN.vocab_size + 1))

    for t in (0, 3):
        gradient = np.asarray(jax.jit(jax.grad(logits_at))(qwen.embedding[...], t))  # untied head: only inputs matter
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
def test_padding_changes_nothing(qwen, side, filler):
    tokens, mask = pad(ROWS, 9, side, filler)
    logits = np.asarray(FORWARD(qwen, tokens, mask))
    assert np.isfinite(logits).all()  # pads too: they are masked later, and 0 * NaN is NaN
    for i, row in enumerate(ROWS):
        np.testing.assert_allclose(logits[i][mask[i]], oracle(qwen, row), rtol=1e-5, atol=5e-5)


def test_padding_that_is_part_of_the_gradient_stays_finite(qwen):
    tokens, mask = pad(ROWS, 9, "left")
    loss = lambda m: jnp.where(mask[..., None], forward(m, tokens, mask), 0).sum()
    gradient = jax.jit(jax.grad(loss))(qwen)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("ids", [(1, 2, 3), (9, 4, 6)])
def test_packed_rows_are_the_unpacked_ones(qwen, ids):
    """Segments never see each other and their positions restart, whatever their ids; pads may lie around them."""
    lengths = [len(row) for row in ROWS]
    packed = np.array([[0, *np.concatenate(ROWS), 0, 0]], np.int32)
    segment_ids = np.array([[0, *np.repeat(ids, lengths), 0, 0]], np.int32)
    logits = np.asarray(FORWARD(qwen, packed, segment_ids_BT=segment_ids))[0, 1:]
    for row, part in zip(ROWS, np.split(logits, np.cumsum(lengths)), strict=False):
        np.testing.assert_allclose(part, oracle(qwen, row), rtol=1e-5, atol=5e-5)


def test_the_padding_mask_applies_to_packed_rows_too(qwen):
    tokens, segment_ids = np.array([[3, 1, 4, 8]], np.int32), np.array([[1, 1, 1, 1]], np.int32)
    mask = np.array([[True, False, True, True]])
    logits = FORWARD(qwen, tokens, mask, segment_ids_BT=segment_ids)[0]
    np.testing.assert_allclose(logits[mask[0]], oracle(qwen, [3, 4, 8]), rtol=1e-5, atol=5e-5)


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


@pytest.mark.parametrize("name", ["plain", "qwen2", "qwen3"])
def test_decoding_with_the_cache_is_forward(name):
    """Prefill of four columns, the rest one token at a time; a prompt's pads stay out of sight."""
    model = debug_run.model(VARIANTS[name])
    rows = [row + [11, 12, 13] for row in ([3, 1, 4, 1], [6, 5], [7])]
    tokens, mask = pad(rows, 7, "left")
    hidden, (keys, values) = jax.jit(hidden_states, static_argnames="return_cache")(
        model, tokens[:, :4], mask[:, :4], return_cache=True
    )
    grow = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 3), (0, 0), (0, 0)))
    cache = Cache(grow(keys), grow(values), jnp.pad(mask[:, :4], ((0, 0), (0, 3))))
    whole = np.asarray(jax.jit(hidden_states)(model, tokens, mask))
    np.testing.assert_allclose(hidden[mask[:, :4]], whole[:, :4][mask[:, :4]], rtol=1e-5, atol=2e-5)
    step = jax.jit(decode_step)
    for t in range(4, 7):
        hidden, cache = step(model, tokens[:, t], mask[:, :t].sum(axis=1), cache, t)
        np.testing.assert_allclose(hidden, whole[:, t], rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(cache.mask_BS, mask)


@pytest.fixture(scope="module", params=[4, 1], ids=lambda T: f"T={T}")
def grouped(request):
    """Two groups of four rows [left-padded prompt of width 5 | right-padded response of width T]."""
    S, T = 5, request.param
    generator = np.random.default_rng(T)
    prompts, lengths = generator.integers(0, 17, (2, S)), np.array([[3], [5]])
    tokens = np.concatenate([np.repeat(prompts, 4, axis=0), generator.integers(0, 17, (8, T))], axis=1)
    answers = np.arange(T) < [[1], [T], [2], [3], [T], [1], [2], [T]]
    mask = np.concatenate([np.repeat(np.arange(S) >= S - lengths, 4, axis=0), answers], axis=1)
    return tokens, mask, T


def states(model, tokens, mask, T, share):
    """Of whole rows (share = 0), or with each prompt once for every `share` rows."""
    if share:
        return models.response_states(model, tokens, mask, response_width=T, share=share)
    return hidden_states(model, tokens, mask)[:, -T - 1 : -1]


@pytest.mark.parametrize("share", [1, 2, 4])
def test_shared_prompts_are_computed_once_with_the_same_result(qwen, grouped, share):
    tokens, mask, T = grouped
    got, expected = (np.asarray(jax.jit(states, static_argnums=(3, 4))(qwen, tokens, mask, T, s)) for s in (share, 0))
    np.testing.assert_allclose(got[mask[:, -T:]], expected[mask[:, -T:]], rtol=1e-5, atol=2e-5)


def test_the_gradient_through_shared_prompts_is_that_of_whole_rows(qwen, grouped):
    tokens, mask, T = grouped
    weights = np.random.default_rng(0).normal(size=(8, T, 16)).astype(np.float32) * mask[:, -T:, None]
    loss = lambda model, share: jnp.sum(states(model, tokens, mask, T, share) * weights)
    got, expected = (jax.jit(jax.grad(loss), static_argnums=1)(qwen, share) for share in (4, 0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def test_bfloat16_computes_close_to_float32_and_ends_in_float32(qwen):
    exact = FORWARD(qwen, TOKENS)
    rounded = FORWARD(qwen, TOKENS, dtype=jnp.bfloat16)
    assert rounded.dtype == jnp.float32
    assert jax.eval_shape(lambda m: hidden_states(m, TOKENS, dtype=jnp.bfloat16), qwen).dtype == jnp.bfloat16
    error = np.abs(rounded - exact).mean() / np.abs(exact).mean()
    assert 1e-4 < error < 3e-2


def test_rematerialisation_changes_no_gradient(qwen):
    loss = lambda m, remat: jnp.sum(hidden_states(m, TOKENS, remat=remat) ** 2)
    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(qwen, remat) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), plain, again)
    jaxpr = lambda remat: str(jax.make_jaxpr(jax.grad(lambda m: loss(m, remat)))(qwen))
    assert "remat" in jaxpr(True) and "remat" not in jaxpr(False)


def test_forward_runs_without_jit(qwen):
    with jax.disable_jit():
        slow = forward(qwen, TOKENS[:1, :2])
    np.testing.assert_allclose(slow[0], oracle(qwen, TOKENS[0, :2]), rtol=1e-5, atol=5e-5)


def test_models_build_without_a_mesh_and_import_quietly():
    code = "import jax, cispo_jax.models; print(jax._src.xla_bridge.backends_are_initialized())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
