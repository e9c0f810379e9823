"""Training with experts over a mesh: every gradient, several updates, what is sampled, replayed routing, the routers' losses."""

import dataclasses

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cispo_jax import objectives, programs, sharding
from cispo_jax.config import ConfigError, MeshSettings
from cispo_jax.training.packing import Layout
from cispo_jax.training.train_step import init_state, make_train_step
from cispo_jax.types import Batch

# Lightning and softmax layers with 8 experts each: a share for every size of the expert axis.
ARCHITECTURE = dataclasses.replace(debug_run.FAMILIES["minimax"], num_experts=8, num_layers=2, vocab_size=32)
SETTINGS = debug_run.config(
    objective__num_minibatches=1, sampling__prompts_per_step=4, sampling__group_size=4, sampling__max_new_tokens=6,
    objective__load_balance=0.1, objective__router_z=0.01, optimizer__eps=1e-8, model__remat="full",
)  # fmt: skip
B, S, T = 16, 5, 6
ROUTERS = {"load_balance": 0.1, "router_z": 0.01}
MESHES = [(2, 2, 2, 1), (1, 2, 2, 2), (8, 1, 1, 1), (1, 8, 1, 1), (2, 1, 4, 1)]
FAST = {(1, 2, 2, 2)}
MESH_PARAMS = [pytest.param(m, marks=() if m in FAST else pytest.mark.slow, id="x".join(map(str, m))) for m in MESHES]


def make_batch(expert_ids=None) -> Batch:
    generator = np.random.default_rng(0)
    prompts = np.arange(S) >= generator.integers(0, S, B // 4)[:, None]
    padding_mask = np.concatenate(
        [np.repeat(prompts, 4, axis=0), np.arange(T) < generator.integers(1, T + 1, B)[:, None]], axis=1
    )
    loss_mask = padding_mask[:, S:]
    old = np.where(loss_mask, -3 + 0.5 * generator.normal(size=(B, T)), 0).astype(np.float32)
    tokens = np.concatenate(
        [np.repeat(generator.integers(0, 32, (B // 4, S)), 4, axis=0), generator.integers(0, 32, (B, T))], axis=1
    )
    advantages = generator.normal(size=B).astype(np.float32)
    coefficients = (loss_mask / loss_mask.sum()).astype(np.float32)
    return Batch(tokens.astype(np.int32), padding_mask, loss_mask, coefficients, advantages, old, old, expert_ids)


def mesh_of(sizes):
    return sharding.make_mesh(MeshSettings(*sizes), jax.devices()[: int(np.prod(sizes))])


def moved(
    sizes, *, optimizer=None, rate=1.0, updates=1, batch=None, architecture=ARCHITECTURE, tokens=1_000, **options
):
    """What `updates` updates take from the weights (once with rate 1 and no optimizer: the gradient), and the last metrics."""
    mesh = mesh_of(sizes)
    run = programs.make_programs(SETTINGS, architecture, mesh, prompt_width=S)
    optimizer = optimizer or optax.identity()
    abstract = jax.eval_shape(lambda: init_state(debug_run.model(architecture), optimizer))
    shardings = sharding.state_shardings(abstract, mesh)
    options = {"shardings": shardings, **ROUTERS, **options}
    layout = Layout.of(
        prompts=4, group_size=4, prompt=S, response=T, devices=sharding.batch_devices(mesh), pass_tokens=tokens
    )
    rows, _ = run.pack(make_batch() if batch is None else batch, layout)
    step = sharding.OnMesh(mesh, make_train_step(run.log_probs_fn, objectives.cispo_loss, optimizer, **options))
    state = jax.device_put(init_state(debug_run.model(architecture), optimizer), shardings)
    before = jax.device_get(state.model)
    for _ in range(updates):
        state, metrics = step(state, rows, np.float32(rate))
        jax.block_until_ready(metrics)
    return jax.tree.map(np.subtract, before, jax.device_get(state.model)), jax.device_get(metrics)


def close(got, expected, limit):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        # The weights themselves (up to about 1.5) round what is taken from them.
        assert np.abs(x - y).max() <= limit * np.abs(y).max() + 3e-7, jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def whole():
    gradient, metrics = moved((1, 1, 1, 1))
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradient))  # the router's included (O-26)
    return gradient, metrics


@pytest.mark.parametrize("sizes", MESH_PARAMS)
def test_every_mesh_gives_the_gradient_of_one_device(whole, sizes):
    gradient, metrics = moved(sizes)
    close(gradient, whole[0], 1e-5)
    np.testing.assert_allclose(metrics["loss"], whole[1]["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), metrics["router"], whole[1]["router"]
    )


def test_micro_batches_give_the_gradient_of_the_whole(whole):
    """Also of the load-balance loss, whose loads are those of the whole mini-batch."""
    gradient, metrics = moved((1, 1, 1, 1), tokens=1)
    close(gradient, whole[0], 1e-5)
    np.testing.assert_allclose(metrics["loss"], whole[1]["loss"], rtol=1e-5)


OPTIMIZERS = {"sgd": (optax.trace(0.9), 0.1), "adamw": (optax.chain(optax.scale_by_adam(0.9, 0.95, eps=1e-8)), 1e-3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_three_updates_end_near_those_of_one_device(name, sizes):
    optimizer, rate = OPTIMIZERS[name]
    expected, _ = moved((1, 1, 1, 1), optimizer=optimizer, rate=rate, updates=3)
    got, _ = moved(sizes, optimizer=optimizer, rate=rate, updates=3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=0.1 * rate), got, expected)


def test_all_tokens_to_one_expert(whole):
    """Two updates stay finite and equal; what no token reaches has a gradient of exactly 0 (O-27)."""
    del whole
    ids = np.zeros((B, S + T, 2, 2), np.int16)
    ids[..., 1] = 1
    batch = make_batch(ids)
    expected, _ = moved((1, 1, 1, 1), batch=batch, updates=2, rate=0.1, load_balance=0.0)
    got, metrics = moved((2, 2, 2, 1), batch=batch, updates=2, rate=0.1, load_balance=0.0)
    close(got, expected, 1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((got, metrics)))
    for layer in got.layers:
        for leaf in (layer.mlp.gate, layer.mlp.up, layer.mlp.down):
            assert not np.asarray(leaf[...])[:, 2:].any() and np.asarray(leaf[...])[:, :2].any()


# ---- the sampler's record and its replay


@pytest.fixture(scope="module")
def sampled():
    run = programs.make_programs(SETTINGS, ARCHITECTURE, mesh_of((1, 1, 1, 1)), prompt_width=S, eos_ids=(3,))
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [4], [1, 2]]
    options = dict(group_size=4, temperature=1.0, seed=1, step=0)
    return run, prompts, options, run.sample(debug_run.model(ARCHITECTURE), prompts, **options, record_experts=True)


def test_the_sampler_records_the_experts_of_every_token_it_fed(sampled):
    run, prompts, options, rollout = sampled
    ids = rollout.expert_ids
    assert ids.shape == (16, S + T, 2, 2) and ids.dtype == np.int16
    plain = run.sample(debug_run.model(ARCHITECTURE), prompts, **options)
    assert plain.expert_ids is None
    np.testing.assert_array_equal(plain.response_tokens, rollout.response_tokens)
    fed = np.concatenate(
        [rollout.prompt_mask, rollout.response_mask & (np.arange(T) < rollout.lengths[:, None] - 1)], axis=1
    )
    assert (ids[~fed] == -1).all() and (ids[fed] >= 0).all() and (ids[fed] < 8).all()
    assert len(set(rollout.lengths)) > 1  # some rows stopped early
    # The trainer's own choice on the whole rows is the same at unchanged weights.
    tokens, mask = debug_run.rows_of(rollout)
    states = jax.jit(debug_run.models.hidden_states)(debug_run.model(ARCHITECTURE), tokens, mask)
    own = np.moveaxis(np.asarray(debug_run.models.expert_ids(states.routing, ARCHITECTURE)), 0, 2)
    np.testing.assert_array_equal(np.sort(own[fed]), np.sort(ids[fed]))


def test_replay_at_unchanged_weights_is_the_sampler_and_later_keeps_its_selection(sampled):
    run, _, _, rollout = sampled
    tokens, mask = debug_run.rows_of(rollout)
    options = dict(group_size=4, score=run.score_step)
    score = lambda model, ids: debug_run.packed_log_probs(model, tokens, mask, T, expert_ids=ids, **options)
    model = debug_run.model(ARCHITECTURE)
    counted = rollout.loss_mask
    np.testing.assert_allclose(score(model, rollout.expert_ids)[counted], rollout.log_probs[counted], atol=2e-5)
    # Weights that route otherwise: with replay the old selection is used, without it the new one.
    for layer in model.layers:
        layer.mlp.router = type(layer.mlp.router)(-layer.mlp.router[...])
    replayed, anew = score(model, rollout.expert_ids), score(model, None)
    assert np.abs(replayed - anew)[counted].max() > 1e-3
    rows, _ = debug_run.pack(
        debug_run.batch_of(tokens, mask, T, rollout.expert_ids), prompt=S, group_size=4, pass_tokens=1_000
    )
    _, _, sums = jax.jit(run.log_probs_fn)(model, jax.tree.map(lambda x: x[0], rows._replace(passes=None)))
    # A prompt is there once for its group.
    fed = int((counted & (np.arange(T) < rollout.lengths[:, None] - 1)).sum() + rollout.prompt_mask[::4].sum())
    assert sums.recorded_tokens == fed and sums.replaced_tokens > 0.5 * fed
    assert sums.replaced_tokens <= sums.replaced <= 2 * sums.replaced_tokens


@pytest.mark.parametrize("sizes", MESH_PARAMS)
def test_every_mesh_samples_and_records_the_same(sampled, sizes):
    _, prompts, options, expected = sampled
    mesh = mesh_of(sizes)
    run = programs.make_programs(SETTINGS, ARCHITECTURE, mesh, prompt_width=S, eos_ids=(3,))
    model = run.to_sampling(jax.device_put(debug_run.model(ARCHITECTURE), run.shardings.model))
    rollout = run.sample(model, prompts, **options, record_experts=True)
    np.testing.assert_array_equal(rollout.response_tokens, expected.response_tokens)
    np.testing.assert_allclose(rollout.log_probs, expected.log_probs, atol=2e-5)
    np.testing.assert_array_equal(np.sort(rollout.expert_ids), np.sort(expected.expert_ids))


def test_a_run_with_replay_trains_and_reports_its_routers(tmp_path, monkeypatch):
    from cispo_jax import trainer

    debug_run.on_one_device(monkeypatch)
    settings = debug_run.config(
        num_steps=2, objective__routing_replay=True, objective__load_balance=0.01, objective__anchor="rollout"
    )
    model = debug_run.model(dataclasses.replace(debug_run.FAMILIES["mixtral"], vocab_size=32))
    metrics = trainer.train(settings, tmp_path / "run", dataset=debug_run.SUMS, model=model)
    loads = [value for name, value in metrics.items() if name.startswith("moe/load/")]
    assert len(loads) == 4 and np.mean(loads) == pytest.approx(1, rel=1e-5)
    assert metrics["moe/balance_loss"] >= 0.99 and metrics["moe/max_violation"] >= 0
    assert 0 <= metrics["moe/replaced"] <= metrics["moe/replaced_tokens"] <= 1
    assert metrics["policy/rollout_mismatch_max"] < 1e-3


@pytest.mark.parametrize("name", ["load_balance", "router_z", "routing_replay"])
def test_settings_of_experts_are_refused_without_experts(name):
    settings = debug_run.config(**{f"objective__{name}": True if name == "routing_replay" else 0.1})
    with pytest.raises(ConfigError, match=rf"config.objective.{name}=.*: the model has no experts"):
        programs.make_programs(settings, debug_run.TINY, mesh_of((1, 1, 1, 1)), prompt_width=S)


def test_sigmoid_scores_and_a_shared_expert(monkeypatch):
    """By the book: sum of gate x expert over the chosen ones, and the shared expert for every token."""
    from cispo_jax.models.moe import MoeMlp

    config = dataclasses.replace(ARCHITECTURE, router_scores="sigmoid", shared_expert_dim=12, experts_per_token=3)
    mlp = MoeMlp(config, key=jax.random.key(0))
    generator = np.random.default_rng(0)
    mlp = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32), mlp)
    x = generator.normal(size=(1, 6, 16)).astype(np.float32)
    swiglu = lambda x, w: ((h := x @ w[0]) / (1 + np.exp(-h)) * (x @ w[1])) @ w[2]
    expert = lambda m, *e: [np.asarray(w[...], np.float64)[e] for w in (m.gate, m.up, m.down)]
    for normalize in (True, False):
        mlp.normalize_gates = normalize
        output, routing = mlp(x)
        scores = 1 / (1 + np.exp(-x[0].astype(np.float64) @ np.asarray(mlp.router[...], np.float64)))
        expected = swiglu(x[0], expert(mlp.shared))
        for t, row in enumerate(scores):
            chosen = np.argsort(-row)[:3]
            gates = row[chosen] / (row[chosen].sum() if normalize else 1)
            expected[t] += sum(g * swiglu(x[0, t], expert(mlp, e)) for g, e in zip(gates, chosen, strict=True))
        np.testing.assert_allclose(output[0], expected, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(routing.probs_E, (scores / scores.sum(1, keepdims=True)).sum(0), rtol=1e-4)
