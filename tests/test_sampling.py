"""The sampler: its record against the trainer's, keys, stopping, filters, draws, shapes."""

import dataclasses
import functools

import compilations
import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from cispo_jax import models, sharding
from cispo_jax.config import ConfigError
from cispo_jax.sampling import draw, sample_groups

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5, 8]]
EOS = (2, 7)


@pytest.fixture(scope="module")
def model():
    return debug_run.model()


def sample(model, prompts=PROMPTS, **options):
    """One shape for most tests: 4 prompts of width 5, G = 2, T = 6."""
    defaults = dict(group_size=2, max_new_tokens=6, temperature=1.0, eos_ids=EOS, seed=0, prompt_width=5)
    return sample_groups(model, prompts, **{**defaults, **options})


def equal(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if x is None or y is None:
            assert x is y, field.name
        elif x.dtype == np.float32:
            np.testing.assert_allclose(x, y, atol=2e-5, rtol=0)
        else:
            np.testing.assert_array_equal(x, y, err_msg=field.name)


# ---- the record


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_recorded_log_probs_are_the_trainers(model, temperature):
    """Unchanged weights: the ratio is 1 at every temperature, for every prompt length (O-10, O-11)."""
    rollout = sample(model, temperature=temperature)
    expected = debug_run.packed_log_probs(model, *debug_run.rows_of(rollout), 6, group_size=2, temperature=temperature)
    mask = rollout.loss_mask
    np.testing.assert_allclose(rollout.log_probs[mask], expected[mask], rtol=0, atol=1e-5)
    assert rollout.log_probs.dtype == np.float32
    assert len(set(rollout.lengths)) > 1  # mixed lengths, or the test shows little
    plain = jax.jit(lambda *args: debug_run.plain_log_probs(*args, 6, temperature=temperature)[0])
    np.testing.assert_allclose(
        rollout.log_probs[mask], plain(model, *debug_run.rows_of(rollout))[mask], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax", "mixed"])
def test_the_record_is_the_trainers_for_every_kind_of_layer(family):
    model = debug_run.model(debug_run.FAMILIES[family])
    rollout = sample(model, temperature=0.8, eos_ids=range(0, 17, 3))  # so many that lengths differ
    expected = debug_run.packed_log_probs(model, *debug_run.rows_of(rollout), 6, group_size=2, temperature=0.8)
    mask = rollout.loss_mask
    np.testing.assert_allclose(rollout.log_probs[mask], expected[mask], rtol=0, atol=2e-5)
    assert len(set(rollout.lengths)) > 1


def test_routers_and_norms_are_sampled_in_float32():
    """A router that rounds differently in the sampler than in the trainer chooses other experts."""
    model = debug_run.model(debug_run.FAMILIES["minimax"])
    programs = pytest.importorskip("cispo_jax.programs")
    cast = programs.sampling_layout(jax.eval_shape(lambda: model), debug_run.mesh(), jnp.dtype("bfloat16"))(model)
    for name, leaf in jax.tree_util.tree_leaves_with_path(cast.layers):
        exact = any(word in jax.tree_util.keystr(name) for word in ("router", "norm"))
        assert leaf.dtype == (jnp.float32 if exact else jnp.bfloat16), name


def test_bfloat16_record_stays_near_the_trainers(model):
    """Norm scales away from 1 included: what the sampler is handed is what `programs` casts."""
    settings = debug_run.config(model__dtype="bfloat16", mesh__fsdp=1)
    to_sampling = pytest.importorskip("cispo_jax.programs").sampling_layout(
        jax.eval_shape(lambda: model), debug_run.mesh(), jnp.dtype(settings.model.dtype)
    )
    rollout = sample(to_sampling(model), dtype=jnp.bfloat16)
    expected = debug_run.packed_log_probs(model, *debug_run.rows_of(rollout), 6, group_size=2, dtype=jnp.bfloat16)
    mismatch = np.abs(np.exp(expected - rollout.log_probs) - 1)[rollout.loss_mask]
    assert mismatch.mean() < 5e-3, mismatch.mean()


def test_layout_of_a_rollout(model):
    rollout = sample(model, pad_id=2)  # pad = one of the ends (O-08)
    P, G, T = len(PROMPTS), 2, 6
    assert rollout.prompt_tokens.shape == (P * G, 5) and rollout.response_tokens.shape == (P * G, T)
    for row in range(P * G):
        prompt = PROMPTS[row // G]
        assert rollout.prompt_mask[row].tolist() == [False] * (5 - len(prompt)) + [True] * len(prompt)
        assert rollout.prompt_tokens[row][rollout.prompt_mask[row]].tolist() == prompt
        tokens, mask, length = rollout.response_tokens[row], rollout.response_mask[row], rollout.lengths[row]
        assert mask.tolist() == [True] * length + [False] * (T - length)
        ended = [t for t in range(length) if tokens[t] in EOS]
        # Everything up to and including the first end; nothing after it.
        assert ended == ([length - 1] if rollout.finish_reasons[row] == "stop" else [])
        assert rollout.finish_reasons[row] == "stop" or length == T
        assert (tokens[length:] == 2).all() and (rollout.log_probs[row, length:] == 0).all()
        assert (rollout.log_probs[row, :length] < 0).all()
        assert rollout.responses()[row] == tokens[:length].tolist()
    assert {"stop", "length"} == set(rollout.finish_reasons)
    np.testing.assert_array_equal(rollout.loss_mask, rollout.response_mask)


def test_every_end_token_ends_a_response(model):
    """A set of ends (O-12): the other id stops as well, and adding an id only shortens responses."""
    free = sample(model, eos_ids=())
    assert set(free.finish_reasons) == {"length"} and free.response_mask.all()
    common = np.bincount(free.response_tokens.ravel(), minlength=17).argsort()[::-1][:2].tolist()
    for ends in ([common[0]], [common[1]], common):
        rollout = sample(model, eos_ids=ends)
        for row in range(len(rollout.lengths)):
            where = np.flatnonzero(np.isin(free.response_tokens[row], ends))
            expected = where[0] + 1 if len(where) else 6
            assert rollout.lengths[row] == expected
            assert rollout.finish_reasons[row] == ("stop" if len(where) else "length")
            np.testing.assert_array_equal(rollout.response_tokens[row, :expected], free.response_tokens[row, :expected])


def test_an_end_at_the_limit_is_a_stop(model):
    free = sample(model, eos_ids=())
    last = int(free.response_tokens[0, 5])
    row = sample(model, eos_ids=[last])
    if last not in free.response_tokens[0, :5]:
        assert row.lengths[0] == 6 and row.finish_reasons[0] == "stop"
    first = int(free.response_tokens[0, 0])
    short = sample(model, eos_ids=[first])
    assert short.lengths[0] == 1 and short.finish_reasons[0] == "stop"


def test_greedy_is_the_argmax_and_records_temperature_one(model):
    rollout = sample(model, temperature=0)
    tokens, mask = debug_run.rows_of(rollout)
    from cispo_jax.models import forward

    logits = np.asarray(jax.jit(forward)(model, tokens, mask))[:, 4:-1]
    real = rollout.response_mask
    np.testing.assert_array_equal(logits.argmax(-1)[real], rollout.response_tokens[real])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, rollout.response_tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(rollout.log_probs[real], chosen[real], atol=2e-5)
    equal(rollout.take(np.arange(0, 8, 2)), rollout.take(np.arange(1, 8, 2)))  # both samples of a prompt


# ---- where randomness comes from (O-28)


def test_a_response_depends_on_seed_step_prompt_and_sample_only(model):
    base = sample(model)
    again = sample(model)
    equal(base, again)
    order = [2, 0, 3, 1]
    moved = sample(model, [PROMPTS[i] for i in order], prompt_ids=order)
    rows = np.array([i * 2 + g for i in order for g in (0, 1)])
    equal(moved, base.take(rows))
    alone = sample(model, [PROMPTS[1]], prompt_ids=[1])
    equal(alone, base.take(np.array([2, 3])))
    bigger = sample(model, [PROMPTS[1]], prompt_ids=[1], group_size=4)
    equal(bigger.take(np.array([0, 1])), base.take(np.array([2, 3])))
    free = sample(model, eos_ids=(), temperature=2.0)
    for change in (dict(seed=1), dict(step=1), dict(prompt_ids=[10, 11, 12, 13])):
        other = sample(model, eos_ids=(), temperature=2.0, **change)
        # Independent draws of the same prompt: the recorded probabilities bound how often two responses are equal.
        chance = np.exp(free.log_probs.astype(np.float64).sum(axis=1))
        same = (other.response_tokens == free.response_tokens).all(axis=1)
        assert not same[chance < 1e-3].any() and (chance < 1e-3).sum() >= 4, (change, same, chance)


def test_samples_of_a_prompt_differ_even_for_copies_of_a_prompt(model):
    rollout = sample(model, [PROMPTS[0]] * 4, eos_ids=())
    assert len({tuple(row) for row in rollout.response_tokens}) == 8


def test_prompt_width_changes_nothing(model):
    narrow, wide = sample(model), sample(model, prompt_width=9)
    for name in ("response_tokens", "response_mask", "finish_reason"):
        np.testing.assert_array_equal(getattr(narrow, name), getattr(wide, name))
    np.testing.assert_allclose(narrow.log_probs, wide.log_probs, atol=1e-5)
    default = sample(model, prompt_width=None)
    assert default.prompt_tokens.shape == (8, 5)


@pytest.mark.parametrize("sizes", [dict(data=2, fsdp=2), dict(data=2, tensor=2), dict(expert=2, tensor=2)])
def test_every_mesh_samples_the_same(sizes):
    config = debug_run.FAMILIES["minimax"] if "expert" in sizes else debug_run.TINY
    config = dataclasses.replace(config, vocab_size=18)  # divides by 2
    model = debug_run.model(config)
    mesh = debug_run.mesh(**sizes)
    mesh = sharding.sampling_mesh(mesh)
    split = jax.device_put(model, sharding.state_shardings(jax.eval_shape(lambda: model), mesh))
    on_mesh = sharding.OnMesh(mesh, functools.partial(sample, shard_rows=functools.partial(sharding.shard_rows, mesh)))
    equal(on_mesh(split), sample(model))


# ---- draws


def draws(logits, count, seed=0):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(count))
    return np.asarray(jax.jit(jax.vmap(draw.draw_token, (0, None)))(keys, jnp.asarray(logits, jnp.float32)))


@pytest.mark.parametrize(
    "logits",
    [
        np.linspace(-2, 2, 17),  # V is no square: 5 blocks of 4, the last one partly empty
        np.array([0.0, -np.inf, 3.0, -np.inf, 1.0, 1.0, -np.inf]),
        np.array([-np.inf, -np.inf, 0.5, -np.inf]),
        np.array([5.0]),
        np.array([-1000.0, 0.0, 1000.0, 999.0]),  # far beyond exp's range
        np.full(30, 7.0),
    ],
    ids=["17", "holes", "one", "V=1", "large", "uniform"],
)
def test_draws_follow_softmax(logits):
    count = 20_000
    tokens = draws(logits, count)
    with np.errstate(under="ignore"):
        p = np.exp(logits - logits.max())
    p /= p.sum()  # float64: chisquare wants sums equal to 1e-8
    seen = np.bincount(tokens, minlength=len(logits))
    assert len(seen) == len(logits) and (seen[p == 0] == 0).all()
    likely = p * count > 5
    if likely.sum() > 1:
        expected = p[likely] / p[likely].sum() * seen[likely].sum()
        assert stats.chisquare(seen[likely], expected).pvalue > 1e-3
    assert seen[~likely].sum() <= 30


def test_draws_of_a_large_vocabulary_have_the_right_mean_and_rare_tokens_come_up():
    V, count = 5_003, 20_000
    logits = np.zeros(V)
    logits[4_999:] = np.log(50.0)  # four tokens of 50 / 5199 each
    tokens = draws(logits, count)
    share = (tokens >= 4_999).mean()
    assert abs(share - 200 / 5_199) < 4 * np.sqrt(200 / 5_199 / count)
    assert abs(tokens[tokens < 4_999].mean() - 2_499) < 4 * 5_000 / np.sqrt(12 * count)


def test_neighbouring_keys_draw_independently():
    keys = draw.row_keys(
        jnp.uint32(0), jnp.uint32(0), jnp.repeat(jnp.arange(200, dtype=jnp.uint32), 20), jnp.tile(jnp.arange(20), 200)
    )
    logits = jnp.zeros(8)
    tokens = np.stack(
        [
            np.asarray(jax.jit(jax.vmap(lambda k, t=t: draw.draw_token(jax.random.fold_in(k, t), logits)))(keys))
            for t in (0, 1)
        ]
    )
    assert stats.chisquare(np.bincount(tokens[0], minlength=8)).pvalue > 1e-3
    table = np.histogram2d(tokens[0], tokens[1], bins=8)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    table = np.histogram2d(tokens[0][:-1], tokens[0][1:], bins=8)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(top_k=1), {0}),
        (dict(top_k=2), {0, 1}),
        (dict(top_k=99), {0, 1, 2, 3, 4}),
        (dict(top_p=0.5), {0}),  # the smallest set with that mass
        (dict(top_p=0.51), {0, 1}),
        (dict(top_p=0.72), {0, 1, 2}),
        (dict(top_p=1e-6), {0}),
        (dict(top_p=0.95, top_k=2), {0, 1}),
        (dict(top_p=0.6, top_k=4), {0, 1}),
    ],
)
def test_top_p_and_top_k_keep_the_likeliest(options, expected):
    options = {"top_p": 1.0, "top_k": 0, **options}
    order = np.array([3, 0, 4, 1, 2])  # the likeliest is not the first
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), jnp.arange(2_000))
    logits = jnp.broadcast_to(LOGITS[order], (2_000, 5))
    tokens = np.asarray(draw.choose(logits, keys, jnp.zeros(2_000, jnp.int32), greedy=False, **options))
    assert set(order[tokens]) == expected
    p = np.exp(LOGITS.astype(np.float64))[sorted(expected)]
    seen = np.bincount(order[tokens], minlength=5)[sorted(expected)]
    if len(expected) > 1:
        assert stats.chisquare(seen, p / p.sum() * 2_000).pvalue > 1e-3


def test_filters_leave_the_recorded_log_probs_those_of_the_policy(model):
    rollout = sample(model, top_k=3, top_p=0.9)
    trainer = jax.jit(lambda *args: debug_run.plain_log_probs(*args, 6)[0])
    expected = np.asarray(trainer(model, *debug_run.rows_of(rollout)))
    np.testing.assert_allclose(rollout.log_probs[rollout.loss_mask], expected[rollout.loss_mask], atol=1e-5)


# ---- limits, compilation


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_tokens=10), ["overflow", "5", "6", "10"]),
        (dict(prompt_width=4), ["prompt", "5", "4"]),
        (dict(max_new_tokens=0), ["max_new_tokens=0"]),
        (dict(group_size=0), ["group_size=0"]),
        (dict(temperature=-1.0), ["temperature=-1.0"]),
        (dict(temperature=float("nan")), ["temperature=nan"]),
        (dict(top_p=0.0), ["top_p=0.0"]),
        (dict(top_p=1.5), ["top_p=1.5"]),
        (dict(top_k=-1), ["top_k=-1"]),
        (dict(prompts=[]), ["prompts"]),
        (dict(prompts=[[1], []]), ["prompts"]),
        (dict(prompts=[[1, 17]]), ["17"]),  # the vocabulary ends at 16; jax would clamp it silently
        (dict(prompt_ids=[0, 1]), ["prompt_ids"]),
    ],
)
def test_bad_arguments_are_refused_before_device_work(model, options, words):
    compiled = compilations.count()
    with pytest.raises(ConfigError) as error:
        sample(model, **options)
    assert all(word in str(error.value) for word in words), error.value
    assert compilations.count() == compiled


def test_a_cache_that_just_fits_is_taken_and_one_token_works(model):
    assert sample(model, max_tokens=11).response_mask.shape == (8, 6)
    short = sample(model, max_new_tokens=1)
    np.testing.assert_array_equal(short.response_tokens[:, 0], sample(model, eos_ids=()).response_tokens[:, 0])


def test_seeds_steps_prompts_and_ends_compile_once(model):
    sample(model)
    compiled = compilations.count()
    sample(model, seed=5, step=3, prompt_ids=[7, 8, 9, 10_000_000_000], temperature=0.7)
    sample(model, [[1], [2], [3], [4, 4]], eos_ids=(5, 6), seed=-1)
    assert compilations.count() == compiled


def test_decoding_ends_when_every_row_has_stopped(monkeypatch):
    """All tokens end: the loop would otherwise run to the limit."""
    calls = []
    step = models.Transformer.decode_step

    def counted(*arguments, **options):
        jax.debug.callback(lambda: calls.append(1))
        return step(*arguments, **options)

    monkeypatch.setattr(models.Transformer, "decode_step", counted)
    model = debug_run.model(dataclasses.replace(debug_run.TINY, num_layers=1))
    rollout = sample(model, max_new_tokens=40, eos_ids=range(17))
    jax.effects_barrier()
    assert (rollout.lengths == 1).all() and not calls
    rollout = sample(model, max_new_tokens=40, eos_ids=[16] * 17)  # the same shape of ends, compiled once
    jax.effects_barrier()
    assert len(calls) == rollout.lengths.max() - 1 > 5
