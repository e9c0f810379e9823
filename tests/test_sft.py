"""The supervised warm start: layout, loss, and that it learns."""

import debug_run
import jax
import numpy as np

from cispo_jax.config import SftSettings
from cispo_jax.training.sft import padded, warm_start

PAIRS = [([3, 1, 4], [5, 2]), ([6], [7, 8, 2]), ([9, 9], [2]), ([1, 1, 1], [4, 4, 2])]


def test_rows_are_laid_out_as_the_sampler_does():
    tokens, padding, loss, coefficients, *_ = padded(PAIRS[:3], 3, 4)
    np.testing.assert_array_equal(tokens, [[3, 1, 4, 5, 2, 0, 0], [0, 0, 6, 7, 8, 2, 0], [0, 9, 9, 2, 0, 0, 0]])
    np.testing.assert_array_equal(padding, [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(loss, [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    np.testing.assert_allclose(coefficients, loss / 6)


def start(steps, **settings):
    settings = SftSettings(num_steps=steps, batch_size=4, learning_rate=3e-2, **settings)
    taken = []

    def demonstrations(index):
        taken.append(index)
        return PAIRS[index % 4]

    updates = warm_start(
        jax.tree.map(lambda x: x.copy(), debug_run.model()),
        demonstrations,
        settings,
        log_probs_fn=debug_run.log_probs_fn,
        prompt_width=3,
        response_width=4,
        place=lambda batch: debug_run.pack(batch, prompt=3)[0],
    )
    history = [(update, loss) for update, model, loss in updates]
    return history, taken


def test_the_loss_is_the_token_mean_of_the_responses_and_falls():
    history, taken = start(30)
    tokens, padding, mask, *_ = padded(PAIRS, 3, 4)
    log_probs, _ = jax.jit(lambda m: debug_run.plain_log_probs(m, tokens, padding, 4))(debug_run.model())
    np.testing.assert_allclose(history[0][1], -np.asarray(log_probs)[mask].mean(), rtol=1e-5)
    assert [update for update, _ in history] == list(range(1, 31))
    assert taken == list(range(120))
    assert history[-1][1] < 0.1 * history[0][1]


def test_no_steps_no_updates():
    assert start(0) == ([], [])
