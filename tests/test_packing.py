"""Packed rows against every response in a row of its own: where each token goes, and the same log-probs, loss and gradient."""

import functools

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax.objectives import aggregation_weights
from cispo_jax.training import packing
from cispo_jax.training.packing import Layout, pack
from cispo_jax.training.train_step import make_score_step, over_passes
from cispo_jax.types import Batch

S, T, V, G = 5, 7, 17, 4


def make_batch(prompts=3, seed=0, lengths=None, prompt_lengths=None, vocab=V) -> Batch:
    """Groups of G responses of any length; one response of each seed does not train, one ends with tokens that do not."""
    generator = np.random.default_rng(seed)
    rows = prompts * G
    lengths = generator.integers(1, T + 1, rows) if lengths is None else np.asarray(lengths)
    prompt_lengths = generator.integers(1, S + 1, prompts) if prompt_lengths is None else np.asarray(prompt_lengths)
    columns = np.arange(S + T)
    padding_mask = (columns >= S - np.repeat(prompt_lengths, G)[:, None]) & (columns < (S + lengths)[:, None])
    loss_mask = padding_mask[:, S:].copy()
    loss_mask[1] = False
    loss_mask[2, 1] = False
    loss_mask[3, 2:] = False
    prompt = np.repeat(generator.integers(0, vocab, (prompts, S)), G, axis=0)
    values = lambda: np.where(loss_mask, generator.normal(-2, 0.5, (rows, T)), np.nan).astype(np.float32)
    group_ids = np.repeat(np.arange(prompts), G)
    return Batch(
        tokens=np.where(
            padding_mask, np.concatenate([prompt, generator.integers(0, vocab, (rows, T))], axis=1), 0
        ).astype(np.int32),
        padding_mask=padding_mask,
        loss_mask=loss_mask,
        coefficients=np.asarray(aggregation_weights(loss_mask, aggregation="prompt", group_ids=group_ids)),
        advantages=generator.normal(size=rows).astype(np.float32),
        rollout_log_probs=values(),
        old_log_probs=values(),
    )


def layout(prompts=3, **options) -> Layout:
    return Layout.of(prompts=prompts, group_size=G, prompt=S, response=T, **options)


def by_hand(batch):
    """(prompt, response up to its last trained token) of every response that trains."""
    rows = {}
    for i in range(len(batch.tokens)):
        trained = np.flatnonzero(batch.loss_mask[i])
        if trained.size:
            prompt = batch.tokens[i, :S][batch.padding_mask[i, :S]].tolist()
            rows[i] = prompt, batch.tokens[i, S : S + trained[-1] + 1].tolist()
    return rows


def unpacked(packed, places, field="targets"):
    flat = np.asarray(getattr(packed, field)).reshape(-1, packed.targets.shape[-1])
    starts = zip(
        np.flatnonzero(places.row >= 0),
        *(x[places.row >= 0] for x in (places.row, places.start, places.lengths)),
        strict=True,
    )
    return {i: flat[row, start : start + n] for i, row, start, n in starts}


@pytest.mark.parametrize(
    "options", [{}, {"pass_tokens": 1}, {"packed": False}, {"devices": 4}, {"devices": 8}], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_every_trained_token_has_one_place_behind_its_own_context(seed, options):
    batch = make_batch(prompts=6, seed=seed)
    of = layout(6, **options)
    packed, places = pack(batch, of)
    rows = by_hand(batch)
    assert set(np.flatnonzero(places.row >= 0)) == set(rows)
    tokens, segments, prefixes, positions, source = (
        np.asarray(x).reshape(-1, x.shape[-1])
        for x in (packed.tokens, packed.segment_ids, packed.prefix_ids, packed.positions, packed.source)
    )
    assert tokens.shape == (of.passes * of.rows, of.tokens) and source.shape[1] == of.responses
    for i, (prompt, response) in rows.items():
        row, start = places.row[i], places.start[i]
        assert np.asarray(packed.targets).reshape(source.shape)[row, start : start + len(response)].tolist() == response
        for t in range(len(response)):
            column = source[row, start + t]
            seen = (np.arange(of.tokens) <= column) & np.isin(
                segments[row], [segments[row, column], prefixes[row, column]]
            )
            assert tokens[row][seen].tolist() == prompt + response[:t]
            assert positions[row][seen].tolist() == list(range(len(prompt) + t))
    # Whatever is not a place of a trained response neither trains nor counts.
    assert packed.loss_mask.sum() == batch.loss_mask.sum()
    np.testing.assert_allclose(packed.coefficients.sum(), batch.coefficients.sum(), rtol=1e-6)
    for name in ("old_log_probs", "rollout_log_probs", "coefficients"):
        for i, values in unpacked(packed, places, name).items():
            np.testing.assert_array_equal(values, getattr(batch, name)[i, : len(values)])
    for i, values in unpacked(packed, places, "advantages").items():
        assert (values == batch.advantages[i]).all()
    # Ids grow along a row, and a prompt weighs as much as the responses that follow it.
    real = segments > 0
    assert (np.diff(segments, axis=1)[real[:, 1:] & real[:, :-1]] >= 0).all()
    weights = np.asarray(packed.weights).reshape(tokens.shape)
    assert weights.sum() == sum(len(prompt) + len(response) - 1 for prompt, response in rows.values())
    assert np.asarray(packed.passes) <= of.passes and (np.asarray(packed.tokens)[packed.passes :] == 0).all()


def test_full_responses_fill_the_layout_and_short_ones_fewer_passes():
    full = make_batch(lengths=np.full(12, T), prompt_lengths=np.full(3, S))
    full = full._replace(loss_mask=full.padding_mask[:, S:])
    for options in ({"pass_tokens": 1}, {"packed": False, "pass_tokens": 1}):
        assert pack(full, layout(**options))[0].passes == layout(**options).passes
    short = make_batch(lengths=np.full(12, 2), prompt_lengths=np.full(3, 1))
    assert pack(short, layout(pass_tokens=1))[0].passes == 1


def test_a_greedy_choice_that_needs_too_many_rows_gives_way_to_the_even_one(monkeypatch):
    """The layout has room for full groups, each in rows of its own: more rows are never needed, whatever best fit does."""
    monkeypatch.setattr(packing, "ROW_TOKENS", S + 2 * (T - 1))
    of = layout(4)
    assert of.longest == 2
    for seed in range(20):
        batch = make_batch(prompts=4, seed=seed)
        packed, places = pack(batch, of)
        assert (places.row >= 0).sum() == len(by_hand(batch)) and packed.loss_mask.sum() == batch.loss_mask.sum()
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert packing._evenly(groups, of) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]


def test_shapes_do_not_depend_on_lengths_and_rows_are_dealt_out_evenly():
    of = Layout.of(prompts=16, group_size=8, prompt=40, response=200, devices=4)
    generator = np.random.default_rng(0)
    lengths = np.minimum(200, np.exp(generator.normal(3.8, 0.8, 128)).astype(int) + 1)
    rows = packing.assign([b"%d" % (i // 8) for i in range(128)], np.full(128, 40), lengths, of)
    tokens = sum(lengths) - 128 + 40 * 16
    assert len(rows) * of.tokens < 1.25 * tokens + 40 * len(rows)  # little is left free
    batch = make_batch(prompts=6)
    packed, _ = pack(batch, layout(6, devices=4))
    used = (np.asarray(packed.segment_ids)[: packed.passes] > 0).sum(axis=2)
    of_device = used.reshape(int(packed.passes), 4, -1).sum(axis=(0, 2))
    assert of_device.min() > 0.4 * of_device.max()


def test_every_device_gets_a_row_where_there_are_enough_responses():
    one = Layout.of(prompts=2, group_size=8, prompt=10, response=10)
    eight = Layout.of(prompts=2, group_size=8, prompt=10, response=10, devices=8)
    assert one.rows * one.passes == 2 and one.longest == 8
    assert eight.rows * eight.passes == 8 and eight.longest == 2


def test_the_tokens_of_a_pass_are_a_setting():
    sizes = dict(prompts=8, group_size=8, prompt=100, response=1000)
    assert Layout.of(**sizes, pass_tokens=1).rows == 1
    assert Layout.of(**sizes, pass_tokens=3300).rows == 3
    assert Layout.of(**sizes, pass_tokens=10**9) == Layout(1, 64, 1, 1099, 1000, 1)
    assert Layout.of(**sizes).passes >= packing.PASSES


@pytest.mark.parametrize(
    "family",
    [None, "minimax", *(pytest.param(f, marks=pytest.mark.slow) for f in debug_run.FAMILIES if f != "minimax")],
)
@pytest.mark.parametrize("options", [{}, {"packed": False}], ids=["packed", "rows"])
def test_log_probs_are_those_of_every_response_alone(family, options):
    config = debug_run.TINY if family is None else debug_run.FAMILIES[family]
    model, batch = debug_run.model(config), make_batch()
    expected, _ = jax.jit(lambda m: debug_run.plain_log_probs(m, batch.tokens, batch.padding_mask, T))(model)
    packed, places = pack(batch, layout(**options))
    score = make_score_step(functools.partial(debug_run.log_probs_fn, packed=options.get("packed", True)))
    got = places.unpack(np.asarray(score(model, packed)), np.full((len(batch.tokens), T), np.nan, np.float32))
    np.testing.assert_allclose(got[batch.loss_mask], np.asarray(expected)[batch.loss_mask], atol=2e-5)


@pytest.mark.parametrize("family", ["minimax", pytest.param("mixed", marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_every_response_alone(family):
    """Through shared prompts, lightning states and routers, over several passes."""
    model, batch = debug_run.model(debug_run.FAMILIES[family]), make_batch(seed=1)
    weights = np.where(batch.loss_mask, np.random.default_rng(0).normal(size=batch.loss_mask.shape), 0).astype(
        np.float32
    )
    packed, _ = pack(batch._replace(coefficients=weights), layout(pass_tokens=1))
    assert packed.passes > 1

    def of_pass(m, rows):
        return jnp.sum(debug_run.log_probs_fn(m, rows)[0] * rows.coefficients)

    got = jax.jit(
        lambda m: over_passes(lambda rows: jax.grad(of_pass)(m, rows), packed, lambda a, b: jax.tree.map(jnp.add, a, b))
    )(model)
    plain = lambda m: jnp.sum(debug_run.plain_log_probs(m, batch.tokens, batch.padding_mask, T)[0] * weights)
    expected = jax.jit(jax.grad(plain))(model)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * max(1, float(jnp.abs(other).max())))


def test_selections_to_replay_go_where_their_tokens_go():
    batch = make_batch()
    ids = np.random.default_rng(0).integers(0, 4, (12, S + T, 3, 2)).astype(np.int16)
    ids[:, :S] = np.repeat(ids[::G, :S], G, axis=0)
    packed, places = pack(batch._replace(expert_ids=ids), layout())
    found = packed.expert_ids.reshape(-1, *packed.expert_ids.shape[2:])
    source = packed.source.reshape(-1, packed.source.shape[-1])
    for i, (prompt, response) in by_hand(batch).items():
        row = places.row[i]
        columns = source[row, places.start[i] : places.start[i] + len(response)]
        assert (found[row, columns[0]] == ids[i, S - 1]).all()
        np.testing.assert_array_equal(found[row, columns[1:]], ids[i, S : S + len(response) - 1])
    assert (found[np.asarray(packed.segment_ids).reshape(-1, packed.tokens.shape[-1]) == 0] == -1).all()
    # Two groups with the same prompt and other selections keep a prompt each.
    first = lambda x: np.concatenate([np.repeat(x[:1, :S], 12, axis=0), x[:, S:]], axis=1)
    same = batch._replace(tokens=first(batch.tokens), padding_mask=first(batch.padding_mask))
    prompts = lambda b: int((pack(b, layout())[0].weights > 1).sum())
    assert prompts(same) < prompts(same._replace(expert_ids=ids))
