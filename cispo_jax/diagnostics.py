"""What clipping drops and caps, how far the policy has moved, and how well the sampler's record agrees with the trainer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from cispo_jax import masked, objectives
from cispo_jax.masked import Sums

PPO_CLIP = (0.2, 0.2)
DAPO_CLIP = (0.2, 0.28)


def clip_sums(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    epsilon_high: ArrayLike | None = 4.0,
) -> Sums:
    """What PPO and DAPO would have dropped and CISPO caps, whatever objective is trained.

    Arguments as in the losses (`cispo_jax.objectives`). Returns (sum, count) pairs over the counted tokens, to be pooled with
    `masked.add_sums` over micro-batches and updates and divided by `masked.means`:
      `clip/dropped_ppo`, `clip/dropped_dapo`: share of tokens with M = 0 in Eq. 5 at 0.2/0.2 and 0.2/0.28, both signs of A;
      `clip/at_cap`: share with r > 1 + epsilon_high, either sign of A;
      `policy/ratio_mean`, `policy/ratio_max` (a maximum, not a sum).
    """
    arrays = {"old_log_probs": old_log_probs, "advantages": advantages, "loss_mask": loss_mask}
    masked.check_arrays(np.shape(log_probs), **arrays)
    mask = masked.counted(loss_mask)
    ratio = objectives.policy_ratio(log_probs, old_log_probs, mask)
    advantages = masked.select(mask, advantages)
    cap = jnp.inf if epsilon_high is None else 1 + epsilon_high
    of_tokens = {
        "clip/dropped_ppo": objectives.dropped_by_ppo(ratio, advantages, PPO_CLIP),
        "clip/dropped_dapo": objectives.dropped_by_ppo(ratio, advantages, DAPO_CLIP),
        "clip/at_cap": ratio > cap,
        "policy/ratio_mean": ratio,
    }
    tokens = masked.masked_count(mask)
    sums = {name: (masked.masked_sum(values, mask), tokens) for name, values in of_tokens.items()}
    return {**sums, "policy/ratio_max": (masked.masked_max(ratio, mask), tokens)}


def rollout_mismatch(log_probs: ArrayLike, rollout_log_probs: ArrayLike, loss_mask: ArrayLike) -> dict[str, Array]:
    """|exp(log_probs - rollout_log_probs) - 1| over the counted tokens: `policy/rollout_mismatch_max`, `_p99` and `_mean`.

    `log_probs` are the trainer's before the first update, `rollout_log_probs` what the sampler recorded; all [B, T].
    """
    masked.check_arrays(np.shape(log_probs), rollout_log_probs=rollout_log_probs, loss_mask=loss_mask)
    mask = masked.counted(loss_mask)
    mismatch = jnp.abs(objectives.policy_ratio(log_probs, rollout_log_probs, mask) - 1)
    return {
        "policy/rollout_mismatch_max": masked.masked_max(mismatch, mask),
        "policy/rollout_mismatch_p99": masked.masked_quantile(mismatch, mask, 0.99),
        "policy/rollout_mismatch_mean": masked.masked_mean(mismatch, mask),
    }


def gradient_weights(loss_fn: Callable[..., Any], **settings: Any) -> Callable[[ArrayLike, ArrayLike], Array]:
    """The weight w(r, A) that a loss gives a token: the coefficient of A grad log pi in minus its gradient.

    Works for any loss with the signature of `cispo_loss`; `settings` are handed to it (e.g. `epsilon_high=0.28`). Each (r, A) is a
    batch of one token of its own.

        w = gradient_weights(ppo_loss)(ratio, advantages)     # [0, 1.5] for ratio 1.5 and advantages [1, -1]

    Returns:
      A function of `ratio` (> 0) and `advantages` (arrays that broadcast) to float32 weights; 0 where the advantage is 0.
    """

    def weight(log_ratio: Array, advantage: Array) -> Array:
        # Log-probs <= 0 whose difference is the log ratio without rounding.
        log_prob = jnp.minimum(log_ratio, 0)

        def loss(log_prob: Array) -> Array:
            one = jnp.ones((1, 1))
            old_log_probs = one * (jax.lax.stop_gradient(log_prob) - log_ratio)
            return loss_fn(one * log_prob, old_log_probs, advantage[None], one > 0, **settings)[0].sum()

        return -jax.grad(loss)(log_prob) / jnp.where(advantage == 0, 1, advantage)

    def weights(ratio: ArrayLike, advantages: ArrayLike) -> Array:
        ratio, advantages = jnp.broadcast_arrays(jnp.asarray(ratio, jnp.float32), jnp.asarray(advantages, jnp.float32))
        return jax.jit(jax.vmap(weight))(jnp.log(ratio).ravel(), advantages.ravel()).reshape(ratio.shape)

    return weights
