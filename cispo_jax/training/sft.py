"""Supervised warm start: next-token cross-entropy on demonstrations, the same model and optimizer as the RL phase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax.config import OptimizerSettings, SftSettings
from cispo_jax.masked import masked_mean
from cispo_jax.training.optimizer import learning_rate, make_optimizer
from cispo_jax.training.train_step import LogProbsFn
from cispo_jax.types import TrainState


def warm_start(
    model: Any,
    demonstrations: Callable[[int], tuple[Sequence[int], Sequence[int]]],
    settings: SftSettings,
    *,
    log_probs_fn: LogProbsFn,
    prompt_width: int,
    response_width: int,
    shardings: Any = None,
    shard_rows: Callable[[np.ndarray], jax.Array] = jnp.asarray,
) -> Iterator[tuple[int, Any, float]]:
    """Yields (update, model, loss) of each of `settings.num_steps` updates; the model handed in is donated.

    `demonstrations(i)` is the i-th pair (prompt ids, response ids with the EOS) of an endless stream.
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
    def step(state: TrainState, tokens, padding_mask, loss_mask, rate):
        def loss_fn(model):
            log_probs, *_ = log_probs_fn(model, tokens, padding_mask, response_width=loss_mask.shape[1], share=1)
            return -masked_mean(log_probs, loss_mask)

        loss, gradient = jax.value_and_grad(loss_fn)(state.model)
        direction, moments = optimizer.update(gradient, state.optimizer, state.model)
        model = jax.tree.map(lambda w, d: w - rate * d, state.model, direction)
        return TrainState(state.updates + 1, model, moments), loss

    init = jax.jit(optimizer.init, out_shardings=None if shardings is None else shardings.optimizer)
    state = TrainState(jnp.int32(0), model, init(model))
    for update in range(settings.num_steps):
        rows = [demonstrations(update * settings.batch_size + row) for row in range(settings.batch_size)]
        arrays = pack_rows(rows, prompt_width, response_width)
        rate = learning_rate(
            optimizer_settings, step=1, update=update, num_steps=1, updates_per_step=settings.num_steps
        )
        state, loss = step(state, *map(shard_rows, arrays), np.float32(rate))
        yield update + 1, state.model, float(loss)


def pack_rows(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], prompt_width: int, response_width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and padding mask [B, S+T], loss mask [B, T]: prompts left-padded, responses right-padded, as the sampler lays them out."""
    B, S = len(rows), prompt_width
    tokens = np.zeros((B, S + response_width), np.int32)
    padding_mask = np.zeros((B, S + response_width), bool)
    for row, (prompt, response) in enumerate(rows):
        tokens[row, S - len(prompt) : S] = prompt
        tokens[row, S : S + len(response)] = response
        padding_mask[row, S - len(prompt) : S + len(response)] = True
    return tokens, padding_mask, padding_mask[:, S:]
