"""AdamW with global-norm clipping, and the learning rate as a plain function of the position in the run.

The rate is an argument of the jitted step, not state of the optimizer, so that warm-up and decay count rollout steps or updates exactly
as the settings say, also when an update is skipped.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from cispo_jax.config import OptimizerSettings


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Gradient -> direction: clip by global norm, Adam's moments, decoupled weight decay on matrices (not on norms and biases)."""
    clip = optax.clip_by_global_norm(settings.max_grad_norm) if settings.max_grad_norm else optax.identity()
    adam = optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)
    return optax.chain(clip, adam, optax.add_decayed_weights(settings.weight_decay, mask=_decayed))


def _decayed(model: Any) -> Any:
    def is_matrix(path, _):
        names = "/".join(str(getattr(part, "name", getattr(part, "key", part))) for part in path)
        return "norm" not in names and "bias" not in names

    return jax.tree_util.tree_map_with_path(is_matrix, model)


def learning_rate(
    settings: OptimizerSettings, *, step: int, update: int, num_steps: int, updates_per_step: int
) -> float:
    """The rate of update `update` (from 0) of rollout step `step` (from 1).

    Linear warm-up over `settings.warmup` rollout steps or updates: the first one has 1/warmup of the peak, the rate is constant within a
    rollout step where that is the unit. Afterwards constant, or linear / cosine to 0 at the end of the run.
    """
    by_update = settings.warmup_unit == "updates"
    done = (step - 1) * updates_per_step + update if by_update else step - 1
    total = num_steps * updates_per_step if by_update else num_steps
    if done < settings.warmup:
        return settings.learning_rate * (done + 1) / settings.warmup
    progress = (done - settings.warmup) / max(total - settings.warmup, 1)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return settings.learning_rate * decay[settings.schedule]
