"""The update: its gradient is that of the plain loss on the whole batch, however the batch is cut and wherever it lies."""

import dataclasses
import functools

import compilations
import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import masked, models, objectives, programs, sharding
from cispo_jax.config import ObjectiveSettings, OptimizerSettings
from cispo_jax.training import packing
from cispo_jax.training.optimizer import make_optimizer
from cispo_jax.training.packing import Layout
from cispo_jax.training.train_step import init_state, make_score_step, make_train_step
from cispo_jax.types import Batch

B, S, T, V = 8, 3, 5, 18
ARCHITECTURE = debug_run.TINY.__class__(V, 16, 2, 4, 2, 4, 24)


def make_batch(seed=0, rows=B) -> Batch:
    """Eight rows of four prompts (G = 2), ragged lengths, one row left out, ratios on both sides of every bound, NaN under the mask."""
    generator = np.random.default_rng(seed)
    padding_mask = np.arange(S + T) >= np.repeat(generator.integers(0, S, rows // 2), 2)[:, None]
    lengths = generator.integers(1, T + 1, rows)
    padding_mask &= np.arange(S + T) < (S + lengths)[:, None]
    loss_mask = padding_mask[:, S:].copy()
    loss_mask[2] = False
    old = -3 + 1.5 * generator.normal(size=(rows, T))
    prompts = np.repeat(generator.integers(0, V, (rows // 2, S)), 2, axis=0)
    return Batch(
        tokens=np.concatenate([prompts, generator.integers(0, V, (rows, T))], axis=1).astype(np.int32),
        padding_mask=padding_mask,
        loss_mask=loss_mask,
        advantages=generator.normal(size=rows).astype(np.float32),
        rollout_log_probs=np.where(loss_mask, old + 0.5 * generator.normal(size=old.shape), np.nan).astype(np.float32),
        old_log_probs=np.where(loss_mask, old, np.nan).astype(np.float32),
        coefficients=np.zeros(loss_mask.shape, np.float32),
    )


def packed(batch, aggregation="token", group_ids=None, normalizer=None, **options):
    """The mini-batch with its coefficients, as the step takes it."""
    options = {"group_size": 2, **options}
    group_ids = np.arange(len(batch.tokens)) // 2 * 3 if group_ids is None else group_ids
    coefficients = objectives.aggregation_weights(
        batch.loss_mask, aggregation=aggregation, group_ids=group_ids, normalizer=normalizer
    )
    return debug_run.pack(batch._replace(coefficients=np.asarray(coefficients)), prompt=S, **options)[0]


@pytest.fixture(scope="module")
def model():
    return debug_run.model(ARCHITECTURE)


def bigram():
    """The smallest policy: logits [V, V] of the token after each token. The update takes any pytree; this one compiles fast."""
    return {"table": np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)}


def bigram_log_probs(model, rows):
    log_p = jax.nn.log_softmax(model["table"][jnp.take_along_axis(rows.tokens, rows.source, axis=1)])
    chosen = jnp.take_along_axis(log_p, rows.targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), None


def whole_rows(model, tokens, padding_mask):
    """Log-probs and entropy by the book, of either policy."""
    if isinstance(model, dict):
        log_p = jax.nn.log_softmax(model["table"][tokens[:, -T - 1 : -1]])
        return jnp.take_along_axis(log_p, tokens[:, -T:, None], axis=-1)[..., 0], -jnp.sum(
            jnp.exp(log_p) * log_p, axis=-1
        )
    return debug_run.plain_log_probs(model, tokens, padding_mask, T)


def make_step(model, loss_fn, optimizer, **options):
    log_probs_fn = bigram_log_probs if isinstance(model, dict) else debug_run.log_probs_fn
    return make_train_step(log_probs_fn, loss_fn, optimizer, **options)


def keep_gradient():
    """An "optimizer" that hands back the gradient: with a rate of 1 the weights fall by exactly it."""
    import optax

    return optax.identity()


LAYOUT = ("aggregation", "normalizer", "group_ids", "group_size", "devices", "pass_tokens", "packed")


def moved(model, batch, loss_fn=objectives.cispo_loss, *, place=lambda x: x, optimizer=None, **options):
    """(gradient by the step, metrics): the state's weights before less after, with a rate of 1."""
    optimizer = optimizer or keep_gradient()
    layout = {name: options.pop(name) for name in LAYOUT if name in options}
    step = make_step(model, loss_fn, optimizer, **options)
    before = jax.tree.map(np.array, model)
    state = init_state(jax.tree.map(jnp.array, model), optimizer)  # copied: the step donates it
    if "shardings" in options:
        state = jax.device_put(state, options["shardings"])
    state, metrics = step(state, place(packed(batch, **layout)), np.float32(1))
    return jax.tree.map(lambda a, b: a - np.asarray(b), before, state.model), jax.device_get(metrics)


def close(a, b, limit=1e-5):
    """Largest difference of a leaf against its largest entry."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        scale = max(float(np.abs(y).max()), 1e-3)
        # The weights themselves (up to about 1.5) round what is taken from them.
        assert np.abs(x - y).max() <= limit * scale + 3e-7, (jax.tree_util.keystr(path), np.abs(x - y).max(), scale)
    assert max(float(np.abs(y).max()) for y in jax.tree.leaves(b)) > 1e-3


def plain_gradient(model, batch, loss_fn, **options):
    def loss(model):
        log_probs, _ = whole_rows(model, batch.tokens, batch.padding_mask)
        return loss_fn(log_probs, batch.old_log_probs, batch.advantages, batch.loss_mask, **options)[0]

    return jax.jit(jax.value_and_grad(loss))(model)


CASES = {
    "cispo": ("token", {}),
    "reinforce": ("sequence", {}),
    "ppo": ("token", {}),
    "grpo": ("sequence", {}),
    "dapo": ("prompt", {}),
    "gspo": ("sequence", dict(epsilon_low=0.5, epsilon_high=0.5)),
    "unified": ("token", dict(weight_clip=(0.3, 0.6), mask_clip=(0.2, 0.28))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_update_follows_the_gradient_of_the_plain_loss(name):
    agrees_with_the_plain_loss(bigram(), name)


def test_the_update_of_a_transformer_follows_the_gradient_of_the_plain_loss(model):
    agrees_with_the_plain_loss(model, "cispo")


def agrees_with_the_plain_loss(model, name):
    batch = make_batch()
    aggregation, settings = CASES[name]
    loss_fn = functools.partial(getattr(objectives, f"{name}_loss"), **settings)
    group_ids = dict(group_ids=np.arange(B) // 2) if aggregation == "prompt" else {}
    loss, expected = plain_gradient(model, batch, loss_fn, aggregation=aggregation, **group_ids)
    # Packed and cut into several passes at the same time: every token's coefficient is that of the whole batch.
    assert packed(batch, pass_tokens=1).passes > 1
    gradient, metrics = moved(model, batch, loss_fn, aggregation=aggregation, pass_tokens=1)
    close(gradient, expected)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    norm = np.sqrt(sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(expected)))
    np.testing.assert_allclose(metrics["grad/norm"], norm, rtol=1e-5)
    assert metrics["updates"] == 1


@pytest.fixture(scope="module")
def whole(model):
    """One device, one pass: what every other layout must agree with."""
    return moved(model, make_batch(), pass_tokens=1_000)


@pytest.fixture(scope="module")
def whole_bigram():
    return moved(bigram(), make_batch(), pass_tokens=1_000)


@pytest.mark.parametrize(
    "layout",
    [{}, {"packed": False}, {"packed": False, "pass_tokens": 1}, {"packed": False, "pass_tokens": 20}],
    ids=str,
)
def test_passes_add_up(whole_bigram, layout):
    gradient, metrics = moved(bigram(), make_batch(), **layout)
    close(gradient, whole_bigram[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), metrics, whole_bigram[1])


@pytest.mark.parametrize(("sizes", "tokens"), [(dict(data=2, fsdp=2), 1), (dict(fsdp=2, tensor=2), 1_000)])
def test_every_mesh_gives_the_gradient_of_one_device(model, whole, sizes, tokens):
    """The token mean is over the whole batch, not of means of devices (O-02)."""
    mesh = debug_run.mesh(**sizes)
    optimizer = keep_gradient()
    shardings = sharding.state_shardings(jax.eval_shape(lambda: init_state(model, optimizer)), mesh)
    place = functools.partial(sharding.shard_passes, mesh)
    layout = dict(devices=sharding.batch_devices(mesh), pass_tokens=tokens, place=place)
    gradient, metrics = moved(model, make_batch(), shardings=shardings, **layout)
    close(gradient, whole[0])
    np.testing.assert_allclose(metrics["loss"], whole[1]["loss"], rtol=1e-5)


def test_row_order_changes_nothing(whole_bigram):
    order = np.array([5, 2, 7, 0, 1, 6, 4, 3])
    gradient, _ = moved(bigram(), jax.tree.map(lambda x: x[order], make_batch()), group_ids=order // 2)
    close(gradient, whole_bigram[0])


def test_an_all_masked_batch_moves_nothing():
    """Adam would step on a zero gradient, and weight decay without any (DESIGN 4)."""
    settings = OptimizerSettings(weight_decay=0.1, eps=1e-15)
    optimizer = make_optimizer(settings)
    step = make_step(bigram(), objectives.cispo_loss, optimizer)
    state = init_state(jax.tree.map(jnp.array, bigram()), optimizer)
    batch = make_batch()
    state, _ = step(state, packed(batch), np.float32(1e-2))
    compiled, before = compilations.count(), jax.device_get(state)
    masked_batch = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    state, metrics = step(state, packed(masked_batch), np.float32(1e-2))
    assert compilations.count() == compiled
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert metrics["updates"] == 0 and metrics["loss"] == 0 and metrics["grad/norm"] == 0
    assert state.updates == 1
    state, metrics = step(state, packed(batch), np.float32(1e-2))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
    assert state.updates == 2
    assert not np.array_equal(before.model["table"], state.model["table"])


def test_the_state_is_donated_and_steps_compile_once_on_a_mesh(model):
    mesh = debug_run.mesh(fsdp=4)
    optimizer = make_optimizer(OptimizerSettings())
    shardings = sharding.state_shardings(jax.eval_shape(lambda: init_state(model, optimizer)), mesh)
    step = make_train_step(debug_run.log_probs_fn, objectives.cispo_loss, optimizer, shardings=shardings)
    state = jax.device_put(init_state(jax.tree.map(jnp.array, model), optimizer), shardings)
    compiled = []
    for seed in range(3):
        donated = jax.tree.leaves(state)
        batch = sharding.shard_passes(mesh, packed(make_batch(seed), devices=4))
        state, metrics = step(state, batch, np.float32(1e-3 / (1 + seed)))
        jax.block_until_ready(metrics)
        assert all(x.is_deleted() for x in donated)
        compiled.append(compilations.count())
    assert len(set(compiled)) == 1
    for x in jax.tree.leaves((state.model, state.optimizer)):
        assert x.dtype == jnp.float32 or x.ndim == 0
    # Moments are split like their parameters: a device holds a quarter of what fsdp splits.
    adam = state.optimizer[1]
    for leaf in (
        state.model.layers[0].mlp.gate,
        adam.mu.layers[0].mlp.gate,
        adam.nu.layers[0].mlp.gate,
        adam.mu.embedding,
    ):
        assert leaf[...].addressable_shards[0].data.size * 4 == leaf[...].size


def test_token_weights_follow_the_importance_cap(whole_bigram):
    model, batch = bigram(), make_batch()
    with np.errstate(invalid="ignore"):
        weights = np.minimum(np.exp(batch.old_log_probs - batch.rollout_log_probs), 1.5)
    _, expected = plain_gradient(model, batch, objectives.cispo_loss, aggregation="token", token_weights=weights)
    gradient, _ = moved(model, batch, importance_cap=1.5, pass_tokens=1)
    close(gradient, expected)
    assert np.abs(gradient["table"] - whole_bigram[0]["table"]).max() > 1e-4


def test_constant_aggregation_divides_by_the_normalizer():
    model, batch = bigram(), make_batch()
    _, expected = plain_gradient(model, batch, objectives.cispo_loss, aggregation="constant", normalizer=40.0)
    gradient, _ = moved(model, batch, aggregation="constant", normalizer=40.0, pass_tokens=1)
    close(gradient, expected)


def test_the_mean_is_pooled_over_counted_tokens(whole_bigram):
    batch = make_batch()
    log_probs, entropy = whole_rows(bigram(), batch.tokens, batch.padding_mask)
    mask = batch.loss_mask
    means = masked.means(whole_bigram[1]["sums"])
    np.testing.assert_allclose(means["policy/entropy"], np.asarray(entropy)[mask].mean(), rtol=1e-5)
    ratio = np.exp(np.asarray(log_probs, np.float64) - batch.old_log_probs)[mask]
    np.testing.assert_allclose(means["policy/ratio_mean"], ratio.mean(), rtol=1e-4)
    np.testing.assert_allclose(means["policy/ratio_max"], ratio.max(), rtol=1e-4)
    np.testing.assert_allclose(means["clip/at_cap"], (ratio > 5).mean(), rtol=1e-6)
    advantages = np.broadcast_to(batch.advantages[:, None], mask.shape)[mask]
    dropped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    np.testing.assert_allclose(means["clip/dropped_ppo"], dropped.mean(), rtol=1e-6)
    assert 0 < dropped.mean() < 1


def test_bfloat16_compute_keeps_float32_masters(model):
    """At RL learning rates a bfloat16 weight of 1.0 would never move (O-40)."""
    log_probs_fn = functools.partial(debug_run.log_probs_fn, dtype=jnp.bfloat16)
    optimizer = make_optimizer(OptimizerSettings(learning_rate=1e-6))
    step = make_train_step(log_probs_fn, objectives.cispo_loss, optimizer)
    before = jax.device_get(model)
    state = init_state(jax.tree.map(jnp.array, model), optimizer)
    for _ in range(3):
        state, _ = step(state, packed(make_batch()), np.float32(1e-6))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.model))
    change = np.abs(np.asarray(state.model.final_norm[...], np.float64) - before.final_norm[...])
    assert (change > 1e-6).mean() > 0.8 and change.max() < 4e-6


def test_score_step_is_the_same_forward_in_pieces(model):
    batch = make_batch()
    expected = jax.jit(lambda m: debug_run.plain_log_probs(m, batch.tokens, batch.padding_mask, T)[0])(model)
    for tokens in (1, 20):
        rows, places = debug_run.pack(batch, prompt=S, group_size=2, pass_tokens=tokens)
        got = places.unpack(np.asarray(make_score_step(debug_run.log_probs_fn)(model, rows)), batch.old_log_probs)
        np.testing.assert_allclose(got[batch.loss_mask], np.asarray(expected)[batch.loss_mask], atol=1e-5)


# ---- objectives by name and of one's own


@pytest.mark.parametrize(
    ("settings", "aggregation", "cap"),
    [
        (dict(name="cispo"), "token", 4.0),
        (dict(name="cispo", epsilon_high=5.0), "token", 5.0),
        (dict(name="ppo"), "token", 0.2),
        (dict(name="grpo"), "sequence", 0.2),
        (dict(name="dapo"), "token", 0.28),
        (dict(name="gspo"), "sequence", 4e-4),
        (dict(name="reinforce"), "sequence", 4.0),
        (dict(name="unified", aggregation="prompt"), "prompt", 4.0),
    ],
)
def test_each_name_reaches_its_own_loss_with_its_own_defaults(settings, aggregation, cap):
    """O-04: no name falls through to another's formula."""
    notes = []
    loss_fn, reduced, upper = programs.resolve_objective(ObjectiveSettings(**settings), None, notes)
    assert (reduced, upper) == (aggregation, cap) and not notes
    arrays = (jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -0.4]]), jnp.array([1.0]), jnp.ones((1, 2), bool))
    coefficients = jnp.array([[0.5, 0.5]])
    plain = getattr(objectives, f"{settings['name']}_loss")
    bounds = {"epsilon_high": settings["epsilon_high"]} if "epsilon_high" in settings else {}
    got, expected = (jax.grad(lambda x, f=f: f(x, *arrays[1:])[0])(arrays[0]) for f in (
        lambda *a: loss_fn(*a, aggregation=coefficients), lambda *a: plain(*a, aggregation="token", **bounds)))  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_unified_takes_its_four_bounds():
    settings = ObjectiveSettings(
        name="unified", epsilon_low=0.1, epsilon_high=0.5, mask_epsilon_low=0.2, mask_epsilon_high=0.28
    )
    loss_fn, _, _ = programs.resolve_objective(settings, None, [])
    ratios = np.array([0.5, 0.85, 1.0, 1.3, 2.0])
    arrays = (np.log(ratios)[None], np.zeros((1, 5)), np.ones(1), np.ones((1, 5), bool))
    gradient = jax.grad(lambda x: loss_fn(x, *arrays[1:], aggregation=jnp.ones((1, 5)))[0])(
        jnp.asarray(arrays[0], jnp.float32)
    )
    np.testing.assert_allclose(-gradient[0], [0.9, 0.9, 1.0, 0.0, 0.0], rtol=1e-6)


def test_unified_keeps_its_default_cap_when_only_the_floor_is_set():
    """An upper bound that nobody switched off must not vanish."""
    loss_fn, _, _ = programs.resolve_objective(ObjectiveSettings(name="unified", epsilon_low=0.5), None, [])
    gradient = jax.grad(
        lambda x: loss_fn(x, jnp.zeros((1, 1)), jnp.ones(1), jnp.ones((1, 1), bool), aggregation=jnp.ones((1, 1)))[0]
    )
    np.testing.assert_allclose(-gradient(jnp.full((1, 1), 3.0)), 5.0, rtol=1e-6)


def test_a_positive_lower_bound_warns_once():
    notes = []
    programs.resolve_objective(ObjectiveSettings(epsilon_low=0.2), None, notes)
    assert len(notes) == 1 and "epsilon_low=0.2" in notes[0] and "0.8" in notes[0]


@pytest.mark.parametrize("pass_tokens", [0, 10**6])  # several passes, whose gradients are added up, and one
def test_memory_grows_with_tokens_not_with_vocabulary_times_tokens(pass_tokens):
    """SmolLM2-135M, 16 x 256 tokens, by the compiler's own account: 16k -> 128k words add what the head itself holds."""
    small, large = 2**14, 2**17

    def peak(vocab_size):
        architecture = dataclasses.replace(models.PRESETS["smollm2-135m"], vocab_size=vocab_size)
        optimizer = make_optimizer(OptimizerSettings())
        layout = Layout.of(prompts=2, group_size=8, prompt=128, response=128, pass_tokens=pass_tokens)
        options = {"remat": "full", "chunk_size": programs.chunk_tokens(vocab_size)}
        log_probs_fn = functools.partial(programs.response_log_probs, **options)
        step = make_train_step(log_probs_fn, objectives.cispo_loss, optimizer)
        state = jax.eval_shape(lambda: init_state(models.Transformer(architecture, key=jax.random.key(0)), optimizer))
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        memory = step.lower(state, packing.shapes(layout), rate).compile().memory_analysis()
        assert (layout.passes > 1) == (pass_tokens == 0)
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    # Weights, two moments and the gradient, and with several passes the sum of their gradients.
    copies = 4 if pass_tokens else 5
    own = copies * 4 * (large - small) * models.PRESETS["smollm2-135m"].embed_dim
    first, second = peak(small), peak(large)
    assert second - first - own < 0.1 * first
