"""Supervised warm start: next-token cross-entropy on demonstrations, the same model and optimizer as the RL phase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax.config import OptimizerSettings, SftSettings
from cispo_jax.masked import masked_sum
from cispo_jax.training.optimizer import learning_rate, make_optimizer
from cispo_jax.training.train_step import LogProbsFn, over_passes
from cispo_jax.types import Batch, Packed, TrainState


def warm_start(
    model: Any,
    demonstrations: Callable[[int], tuple[Sequence[int], Sequence[int]]],
    settings: SftSettings,
    *,
    log_probs_fn: LogProbsFn,
    prompt_width: int,
    response_width: int,
    place: Callable[[Batch], Packed],
    shardings: Any = None,
) -> Iterator[tuple[int, Any, float]]:
    """Yields (update, model, loss) of each of `settings.num_steps` updates; the model handed in is donated.

    `demonstrations(i)` is the i-th pair (prompt ids, response ids with the EOS) of an endless stream; `place` packs a batch of them.
    """
    optimizer_settings = OptimizerSettings(
        learning_rate=settings.learning_rate,
        eps=1e-8,
        weight_decay=settings.weight_decay,
        schedule="cosine",
        warmup=max(1, settings.num_steps // 20),
        warmup_unit="updates",
    )
    optimizer = make_optimizer(optimizer_settings)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))
    def step(state: TrainState, batch: Packed, rate):
        def loss_fn(model, rows: Packed):
            log_probs, *_ = log_probs_fn(model, rows)
            return -masked_sum(rows.coefficients * log_probs, rows.loss_mask)

        of_pass = lambda rows: jax.value_and_grad(loss_fn)(state.model, rows)
        loss, gradient = over_passes(of_pass, batch, lambda a, b: jax.tree.map(jnp.add, a, b))
        direction, moments = optimizer.update(gradient, state.optimizer, state.model)
        model = jax.tree.map(lambda w, d: w - rate * d, state.model, direction)
        return TrainState(state.updates + 1, model, moments), loss

    init = jax.jit(optimizer.init, out_shardings=None if shardings is None else shardings.optimizer)
    state = TrainState(jnp.int32(0), model, init(model))
    for update in range(settings.num_steps):
        rows = [demonstrations(update * settings.batch_size + row) for row in range(settings.batch_size)]
        rate = learning_rate(
            optimizer_settings, step=1, update=update, num_steps=1, updates_per_step=settings.num_steps
        )
        state, loss = step(state, place(padded(rows, prompt_width, response_width)), np.float32(rate))
        yield update + 1, state.model, float(loss)


def padded(rows: Sequence[tuple[Sequence[int], Sequence[int]]], prompt_width: int, response_width: int) -> Batch:
    """Demonstrations as a mini-batch whose loss is the mean over response tokens, laid out as the sampler does."""
    B, S = len(rows), prompt_width
    tokens = np.zeros((B, S + response_width), np.int32)
    padding_mask = np.zeros((B, S + response_width), bool)
    for row, (prompt, response) in enumerate(rows):
        tokens[row, S - len(prompt) : S] = prompt
        tokens[row, S : S + len(response)] = response
        padding_mask[row, S - len(prompt) : S + len(response)] = True
    loss_mask = padding_mask[:, S:]
    zeros = np.zeros(loss_mask.shape, np.float32)
    return Batch(
        tokens=tokens,
        padding_mask=padding_mask,
        loss_mask=loss_mask,
        coefficients=loss_mask / np.float32(max(loss_mask.sum(), 1)),
        advantages=zeros[:, 0],
        rollout_log_probs=zeros,
        old_log_probs=zeros,
    )
