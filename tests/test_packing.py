"""Packed rows against every response in a row of its own: where each token goes, and the same log-probs, loss and gradient."""

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax.objectives import aggregation_weights
from cispo_jax.training.packing import Layout, pack
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
        tokens=np.where(padding_mask, np.concatenate([prompt, generator.integers(0, vocab, (rows, T))], axis=1), 0).astype(np.int32),
        padding_mask=padding_mask,
        loss_mask=loss_mask,
        coefficients=np.asarray(aggregation_weights(loss_mask, aggregation="prompt", group_ids=group_ids)),
        advantages=generator.normal(size=rows).astype(np.float32),
        rollout_log_probs=values(),
        old_log_probs=values(),
    )


def layout(prompts=3, **options) -> Layout:
    return Layout.of(prompts=prompts, group_size=G, prompt=S, response=T, **options)


@pytest.mark.parametrize("family", [None, *debug_run.FAMILIES])
@pytest.mark.parametrize("options", [{}, {"pass_tokens": 1}, {"packed": False}], ids=["packed", "passes", "rows"])
def test_log_probs_are_those_of_every_response_alone(family, options):
    config = debug_run.TINY if family is None else debug_run.FAMILIES[family]
    model, batch = debug_run.model(config), make_batch()
    expected, _ = jax.jit(lambda m: debug_run.plain_log_probs(m, batch.tokens, batch.padding_mask, T))(model)
    packed, places = pack(batch, layout(**options))
    flags = {"packed": options.get("packed", True)}
    one_pass = lambda m, rows: debug_run.log_probs_fn(m, rows, **flags)[0]
    score = jax.jit(lambda m: jnp.stack([one_pass(m, jax.tree.map(lambda x: x[i], packed._replace(passes=None))) for i in range(len(packed.tokens))]))
    got = places.unpack(np.asarray(score(model)), np.full((len(batch.tokens), T), np.nan, np.float32))
    np.testing.assert_allclose(got[batch.loss_mask], np.asarray(expected)[batch.loss_mask], atol=2e-5)
