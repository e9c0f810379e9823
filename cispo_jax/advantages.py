"""From the rewards of a group of responses to one prompt, to an advantage a response.

Rows that could not be scored (`valid_PG` false) leave every statistic and get 0: "no signal" rather than "a reward of 0". Drop
rows (e.g. truncated ones) after the advantages are computed, never before: a group must be complete when its mean is taken.
"""

import chex
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.lax import stop_gradient
from jax.typing import ArrayLike


def group_relative_advantages(
    rewards_PG: ArrayLike,
    *,
    scale: str | None = "group",
    valid_PG: ArrayLike | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Array:
    """Rewards less their group's mean, divided by a standard deviation: A = (R - mean) / (std + epsilon).

    GRPO (https://arxiv.org/abs/2402.03300), MiniMax-M1 Eq. 2. Identical rewards of a group give exactly 0.

    Args:
      rewards_PG: [P, G] float, one reward for each of G responses to P prompts.
      scale: "group" = standard deviation of the group; "batch" = of all the centred rewards of the batch (ScaleRL,
        https://arxiv.org/abs/2510.13786); None = no division (Dr. GRPO).
      valid_PG: [P, G] bool, false where there is no reward (its value, even NaN, is not looked at).
      ddof: 1 = sample standard deviation (TRL, verl, Tunix), 0 = population.
      epsilon: added to the standard deviation; well above float32 round-off, so that noise is not blown up.

    Returns:
      [P, G] float32, not differentiated; 0 where not valid.

    Raises:
      ValueError: for rewards that are not [P, G], another `scale`, a negative `ddof` or `epsilon`.
    """
    if scale not in ("group", "batch", None):
        raise ValueError(f"scale={scale!r}; valid: 'group', 'batch', None")
    if ddof < 0 or not (isinstance(epsilon, Tracer) or epsilon >= 0):
        raise ValueError(f"ddof={ddof!r} and epsilon={epsilon!r} must not be negative")
    centred_PG, valid_PG, count_P1 = _centre(rewards_PG, valid_PG)
    if scale is None:
        return centred_PG
    squares, count = jnp.square(centred_PG).sum(axis=1, keepdims=True), count_P1
    if scale == "batch":
        squares, count = squares.sum(), count.sum()
    std = jnp.sqrt(squares / jnp.maximum(count - ddof, 1))
    # A division by std = 0 happens only where every centred reward is 0; with epsilon = 0 that must not give NaN.
    return centred_PG / jnp.where(std + epsilon == 0, 1, std + epsilon)


def rloo_advantages(rewards_PG: ArrayLike, *, valid_PG: ArrayLike | None = None) -> Array:
    """Leave-one-out: A_i = R_i - mean of the other rewards of the group (https://arxiv.org/abs/2402.14740, Eq. 7).

    [P, G] in, [P, G] float32 out; `valid_PG` and errors as in `group_relative_advantages`. The only valid row of a group gets 0.
    """
    centred_PG, _, count_P1 = _centre(rewards_PG, valid_PG)
    return centred_PG * count_P1 / jnp.maximum(count_P1 - 1, 1)


def _centre(rewards_PG: ArrayLike, valid_PG: ArrayLike | None) -> tuple[Array, Array, Array]:
    """Rewards less the mean over the valid ones of their group (0 where not valid), the validity, valid rows a group [P, 1]."""
    rewards_PG = stop_gradient(jnp.asarray(rewards_PG, jnp.float32))
    chex.assert_rank(rewards_PG, 2, custom_message="rewards are [P, G]", exception_type=ValueError)
    valid_PG = jnp.ones(rewards_PG.shape, bool) if valid_PG is None else jnp.asarray(valid_PG).astype(bool)
    message = f"valid_PG must be [P, G] like the rewards, {rewards_PG.shape}"
    chex.assert_shape(valid_PG, rewards_PG.shape, custom_message=message, exception_type=ValueError)
    # Differences from one of the rewards first: the float32 mean of G equal numbers need not be that number.
    first_P1 = jnp.min(rewards_PG, axis=1, keepdims=True, where=valid_PG, initial=jnp.inf)
    shifted_PG = jnp.where(valid_PG, rewards_PG - first_P1, 0)
    count_P1 = valid_PG.sum(axis=1, keepdims=True, dtype=jnp.float32)
    mean_P1 = shifted_PG.sum(axis=1, keepdims=True) / jnp.maximum(count_P1, 1)
    return jnp.where(valid_PG, shifted_PG - mean_P1, 0), valid_PG, count_P1
