"""The models and batches of the benchmarks, and the bare train step that ours is measured against."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cispo_jax import models
from cispo_jax.models import Transformer, TransformerConfig
from cispo_jax.types import Batch


def common(layers: int = 8, vocab: int = 8_192, experts: int = 0) -> TransformerConfig:
    """A small Qwen3: width 256, 4 / 2 heads of 64, feed-forward 768 or `experts` of 256 (2 a token), tied."""
    moe: dict[str, Any] = (
        {"mlp": ("moe",), "num_experts": experts, "experts_per_token": 2, "expert_dim": 256} if experts else {}
    )
    return TransformerConfig(
        vocab, 256, layers, 4, 2, 64, 768, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_head=True, **moe
    )


def architecture(name: str, **changes: Any) -> TransformerConfig:
    """`common`, or a preset."""
    return common(**changes) if name == "common" else models.PRESETS[name]


def random_model(config: TransformerConfig) -> Transformer:
    return jax.jit(lambda: Transformer(config, key=jax.random.key(0)))()


def typical_lengths(rows: int, limit: int, seed: int = 0) -> np.ndarray:
    """Lengths of responses as RL has them: log-normal (sigma 0.8), cut at the limit, a third of it in the mean."""
    normal = np.random.default_rng(seed).normal(size=rows)
    cut = lambda mu: np.clip(np.round(np.exp(mu + 0.8 * normal)), 1, limit)
    low, high = 0.0, float(np.log(limit))
    for _ in range(50):  # the mean grows with mu
        mu = (low + high) / 2
        low, high = (mu, high) if cut(mu).mean() < limit / 3 else (low, mu)
    return cut(low).astype(int)


def minibatch(vocab: int, lengths: np.ndarray, *, group_size: int, prompt: int, response: int) -> Batch:
    """Random tokens: prompts of `prompt` tokens, responses of the given lengths, padded to `response`; a token mean."""
    generator = np.random.default_rng(0)
    rows = len(lengths)
    prompts = np.repeat(generator.integers(0, vocab, (rows // group_size, prompt)), group_size, axis=0)
    tokens = np.concatenate([prompts, generator.integers(0, vocab, (rows, response))], axis=1)
    padding_mask = np.arange(prompt + response) < (prompt + lengths)[:, None]
    loss_mask = padding_mask[:, prompt:]
    log_probs = np.full(loss_mask.shape, -np.log(vocab), np.float32)
    return Batch(
        tokens=tokens.astype(np.int32),
        padding_mask=padding_mask,
        loss_mask=loss_mask,
        coefficients=(loss_mask / loss_mask.sum()).astype(np.float32),
        advantages=generator.normal(size=rows).astype(np.float32),
        rollout_log_probs=log_probs,
        old_log_probs=log_probs,
    )


class Bare:
    """The least that training does: forward, backward and AdamW, jitted, on rows [prompt | response] padded to the full width.

    Logits of all response tokens at once, nothing computed twice, no clipping, no metrics; the state is donated.
    """

    def __init__(self, model: Transformer, batch: Batch, dtype: str = "float32"):
        self.optimizer = optax.adamw(1e-6, b1=0.9, b2=0.95)
        model = jax.tree.map(jnp.array, model)
        self.state = (model, jax.jit(self.optimizer.init)(model))
        width = batch.loss_mask.shape[1]
        weights = batch.coefficients * batch.advantages[:, None]

        def loss(model):
            hidden = models.hidden_states(model, batch.tokens[:, :-1], dtype=jnp.dtype(dtype)).hidden_BTD[:, -width:]
            log_p = jax.nn.log_softmax((hidden @ models.head_matrix(model).astype(hidden.dtype)).astype(jnp.float32))
            return -jnp.sum(weights * jnp.take_along_axis(log_p, batch.tokens[:, -width:, None], axis=-1)[..., 0])

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(model, moments):
            value, gradient = jax.value_and_grad(loss)(model)
            updates, moments = self.optimizer.update(gradient, moments, model)
            return optax.apply_updates(model, updates), moments, value

        self._step = step

    def __call__(self) -> Any:
        *self.state, value = self._step(*self.state)
        return value
