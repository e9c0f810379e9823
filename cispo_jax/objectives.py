"""The losses: ratio -> weight -> mask -> term -> reduction, with every objective one row of settings of one shared core.

Notation of all functions: r = exp(log_probs - old_log_probs) is the importance ratio of Eq. 1, A the advantage, sg the
stop-gradient, and the sums run over the counted tokens. Equation numbers are those of the CISPO write-up; CISPO itself is
MiniMax-M1, https://arxiv.org/abs/2506.13585, Eqs. 4-7 there.

Arguments that all losses share:
  log_probs: [B, T] float, log pi_theta of the sampled tokens; the only input that is differentiated.
  old_log_probs: [B, T] float, log pi_old of the same tokens, frozen while a batch is reused.
  advantages: [B], one a response, or [B, T].
  loss_mask: [B, T] bool, the tokens that count. Whatever lies elsewhere (NaN, inf) reaches neither value, gradient nor metric.
  aggregation: how token terms become one number: "token" = sum / tokens (Eqs. 4, 5 over the whole batch); "prompt" = token-mean
    inside each group of `group_ids`, mean over groups (Eq. 4 to the letter); "sequence" = token-mean inside each response, mean
    over responses (Eq. 2); "constant" = sum / `normalizer`; "none" = the [B, T] per-token loss, not reduced; or a [B, T] array,
    e.g. a slice of `aggregation_weights`: sum(coefficient x term), so that slices of a batch add up. Groups and responses
    without a counted token are not counted.
  group_ids: [B] or [B, T] integers, which prompt; any values, in any order, a group may be split over rows. For "prompt".
  segment_ids: [B, T] integers for packed rows, 0 = pad, else which response of the row. For "sequence" and GSPO.
  token_weights: [B, T] float that multiply the terms (e.g. `truncated_importance_weights`) and never enter a denominator.
  normalizer: number that replaces the denominator, e.g. the token count of the whole batch when this is one micro-batch of it.

All return `(loss, metrics)`: the float32 scalar to minimise (minus the objective J) and a flat dict of float32 scalars over the
counted tokens: `ratio_mean`, `ratio_max`, `weight_mean` (the weight that multiplies A grad log pi, 0 where dropped), `dropped`
(share of tokens without a gradient), `at_cap` and `at_floor` (share whose weight was clipped from above, from below). They
raise ValueError, naming the argument, for shapes and settings that make no sense. All masked: loss 0, gradient 0.

Epsilons are offsets, as in the paper and in verl: bounds 1 - epsilon_low and 1 + epsilon_high, None = no bound. To convert from
TRL, Liger and EasyDeL, whose CISPO `epsilon_high` is the cap c itself: epsilon_high = c - 1. From Tinker's absolute thresholds
(l, h): epsilon_low = 1 - l, epsilon_high = h - 1.

The log ratio is clipped to +-80 before `exp`. Capped weights stay exact; without a cap, value and gradient are those of a ratio
of exp(+-80), so both stay finite (as long as |A log pi| is below about 6,000) and PPO and its mask form keep agreeing.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from cispo_jax import masked
from cispo_jax.masked import Reduction, Sums, select

LOG_RATIO_LIMIT = 80.0  # exp(80) = 5.5e34 leaves float32 room for a sum over thousands of tokens
AGGREGATIONS = masked.AGGREGATIONS

Epsilon = ArrayLike | None
Clip = tuple[Epsilon, Epsilon]  # (epsilon_low, epsilon_high), None = that side is off
LossOutput = tuple[Array, dict[str, Array]]


class _Row(NamedTuple):
    """An objective, as the settings of the shared core. A dropped token has no gradient."""

    weight_clip: Clip = (None, None)  # range of the weight
    mask_clip: Clip = (None, None)  # range outside which PPO's minimum drops a token
    ratio_is_surrogate: bool = (
        False  # the term is r A (its value is PPO's) instead of sg(weight) A log pi; same gradient
    )
    sequence_ratio: bool = False  # one ratio a response: GSPO


def cispo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    epsilon_low: Epsilon = None,
    epsilon_high: Epsilon = 4.0,
    aggregation: str | ArrayLike = "token",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> LossOutput:
    """CISPO: every token keeps its gradient, with the importance weight clipped and not differentiated.

        J = 1/N sum sg(clip(r, 1 - epsilon_low, 1 + epsilon_high)) A log pi_theta                          (Eqs. 3, 4)

    MiniMax and ScaleRL switch the lower bound off (None, or any value >= 1) and cap at 1 + epsilon_high = 5 or so. A positive lower
    bound keeps pushing tokens that the policy has left. Arguments, returns, errors and other libraries' epsilons: see the module.
    """
    row = _Row(weight_clip=_checked(epsilon_low, epsilon_high))
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer)
    return _loss(row, reduction, log_probs, old_log_probs, advantages, loss_mask, token_weights)


def reinforce_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    aggregation: str | ArrayLike = "sequence",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> LossOutput:
    """Off-policy REINFORCE: the exact policy gradient of r A, whose weight nothing bounds.

        J = E[1/|y| sum sg(r) A log pi_theta]                                                                      (Eq. 2)

    Arguments, returns, errors: see the module.
    """
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer)
    return _loss(_Row(), reduction, log_probs, old_log_probs, advantages, loss_mask, token_weights)


def ppo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    epsilon_low: Epsilon = 0.2,
    epsilon_high: Epsilon = 0.2,
    aggregation: str | ArrayLike = "token",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> LossOutput:
    """PPO's clipped surrogate: a token that has moved far enough in its advantage's direction has no gradient any more.

        J = 1/N sum min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)             (https://arxiv.org/abs/1707.06347, Eq. 7)

    A ratio exactly at a bound keeps its gradient. Arguments, returns, errors and other libraries' epsilons: see the module.
    """
    row = _Row(mask_clip=_checked(epsilon_low, epsilon_high), ratio_is_surrogate=True)
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer)
    return _loss(row, reduction, log_probs, old_log_probs, advantages, loss_mask, token_weights)


def grpo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    epsilon_low: Epsilon = 0.2,
    epsilon_high: Epsilon = 0.2,
    aggregation: str | ArrayLike = "sequence",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> LossOutput:
    """GRPO: `ppo_loss` with a token-mean inside each response, mean over responses (https://arxiv.org/abs/2402.03300, Eq. 3).

    The paper's KL term is separate: add `beta * kl_penalty(...)`. Dr. GRPO is aggregation="constant" with normalizer = rows x
    maximal length. Arguments, returns, errors and other libraries' epsilons: see the module.
    """
    row = _Row(mask_clip=_checked(epsilon_low, epsilon_high), ratio_is_surrogate=True)
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer)
    return _loss(row, reduction, log_probs, old_log_probs, advantages, loss_mask, token_weights)


def dapo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    epsilon_low: Epsilon = 0.2,
    epsilon_high: Epsilon = 0.28,
    aggregation: str | ArrayLike = "token",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> LossOutput:
    """DAPO: `ppo_loss` with a higher upper bound ("Clip-Higher") and a mean over tokens (https://arxiv.org/abs/2503.14476, Eq. 8).

    Arguments, returns, errors and other libraries' epsilons: see the module.
    """
    row = _Row(mask_clip=_checked(epsilon_low, epsilon_high), ratio_is_surrogate=True)
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer)
    return _loss(row, reduction, log_probs, old_log_probs, advantages, loss_mask, token_weights)


def gspo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    epsilon_low: Epsilon = 3e-4,
    epsilon_high: Epsilon = 4e-4,
    aggregation: str | ArrayLike = "sequence",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> LossOutput:
    """GSPO: PPO's clipped surrogate with one ratio a response, the geometric mean of its tokens' ratios.

        s = exp(mean over the response of log r);  J = E[min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A)]
                                                                                  (https://arxiv.org/abs/2507.18071, Eqs. 5, 7)

    Written per token as s_t = sg(s) pi_t / sg(pi_t) (GSPO-token, Eq. 14 there): the same value and gradient when the advantage and
    the coefficient are constant inside a response, and defined when they are not ([B, T] advantages, token weights).
    Arguments, returns, errors and other libraries' epsilons: see the module.
    """
    row = _Row(mask_clip=_checked(epsilon_low, epsilon_high), ratio_is_surrogate=True, sequence_ratio=True)
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer)
    return _loss(row, reduction, log_probs, old_log_probs, advantages, loss_mask, token_weights)


def unified_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    weight_clip: Clip | None = (None, 4.0),
    mask_clip: Clip | None = None,
    aggregation: str | ArrayLike = "token",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> LossOutput:
    """The unified form: clipping the weight and dropping the token are two separate (epsilon_low, epsilon_high) pairs.

        J = 1/N sum sg(clip(r, weight range)) A log pi_theta M                                                     (Eq. 5)
        M = 0 where A > 0 and r > 1 + mask_high, or A < 0 and r < 1 - mask_low, else 1   (strict: ties are kept)

    `mask_clip` without `weight_clip` has exactly PPO's gradient. With the weight clipped to the same range it has not: tokens
    that PPO keeps outside the range (A < 0 and r above it, A > 0 and r below it) get the bound instead of r as weight.
    Without a mask it is CISPO. Arguments, returns, errors and other libraries' epsilons: see the module.
    """
    row = _Row(weight_clip=_pair("weight_clip", weight_clip), mask_clip=_pair("mask_clip", mask_clip))
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer)
    return _loss(row, reduction, log_probs, old_log_probs, advantages, loss_mask, token_weights)


def loss_sums(
    loss_fn: Callable[..., LossOutput],
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    *,
    aggregation: str | ArrayLike | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    **settings: Any,
) -> Sums:
    """The (sum, count) pairs under any loss of this signature: `loss` and its metrics, additive over micro-batches and devices.

    `aggregation=None` is the loss's own default. Sums and counts add over slices that hold whole responses ("sequence") or whole
    groups ("prompt"), and over any slices for "token"; `masked.add_sums` pools two, `masked.means` divides at the end.
    `cispo_sums(...)` etc. are this function with the loss filled in.
    """
    if aggregation is None:
        aggregation = inspect.signature(loss_fn).parameters["aggregation"].default
    if isinstance(aggregation, str) and aggregation in ("constant", "none"):
        raise ValueError(
            f"aggregation={aggregation!r} has no count to add up; valid: token, prompt, sequence, an array"
        )
    if settings.get("normalizer") is not None:
        raise ValueError("normalizer has no place in sums: they carry the count that `masked.means` divides by")
    mask = masked.counted(loss_mask, segment_ids)
    coefficients, count = Reduction(aggregation, group_ids, segment_ids).checked(mask.shape).coefficients(mask)
    arrays = (log_probs, old_log_probs, advantages, loss_mask)
    total, metrics = loss_fn(*arrays, aggregation=coefficients, segment_ids=segment_ids, **settings)
    tokens = masked.masked_count(mask)
    sums = {k: (v if k.endswith("_max") else v * tokens, tokens) for k, v in metrics.items()}
    return {"loss": (total, count), **sums}


cispo_sums = functools.partial(loss_sums, cispo_loss)
reinforce_sums = functools.partial(loss_sums, reinforce_loss)
ppo_sums = functools.partial(loss_sums, ppo_loss)
grpo_sums = functools.partial(loss_sums, grpo_loss)
dapo_sums = functools.partial(loss_sums, dapo_loss)
gspo_sums = functools.partial(loss_sums, gspo_loss)
unified_sums = functools.partial(loss_sums, unified_loss)


def aggregation_weights(
    loss_mask: ArrayLike,
    *,
    aggregation: str | ArrayLike,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> Array:
    """Each token's coefficient [B, T] in the loss, computed once for a whole batch.

    A loss whose `aggregation` is a slice of this array is sum(coefficient x term): micro-batches, devices, packed rows and groups
    split over rows add up exactly to the loss of the whole batch. Arguments and errors as in the losses; "none" is refused. An
    array is handed back (0 where masked), so that a loss of one's own can call this whatever `aggregation` it got.
    """
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer).checked(np.shape(loss_mask))
    if isinstance(aggregation, str) and aggregation == "none":
        raise ValueError(f"aggregation={aggregation!r} has no coefficients; valid: {', '.join(AGGREGATIONS[:-1])}")
    return reduction.weights(masked.counted(loss_mask, segment_ids))


def kl_penalty(
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    loss_mask: ArrayLike,
    *,
    estimator: str = "k3",
    aggregation: str | ArrayLike = "token",
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    normalizer: ArrayLike | None = None,
) -> Array:
    """Estimates KL(pi_theta || pi_ref) from sampled tokens, d = ref_log_probs - log_probs (http://joschu.net/blog/kl-approx.html).

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1

    CISPO has no such term; GRPO adds beta times k3. As a loss, on policy, the gradient of k1 has mean zero, that of k2 is the KL's,
    that of k3 is the KL's with the two policies swapped. Reduced like a loss: by default the mean over counted tokens.
    """
    estimators: dict[str, Callable[[Array], Array]] = {"k1": jnp.negative, "k2": lambda d: d**2 / 2, "k3": _k3}
    if not isinstance(estimator, str) or estimator not in estimators:
        raise ValueError(f"estimator={estimator!r}; valid: {', '.join(estimators)}")
    masked.check_arrays(np.shape(log_probs), ref_log_probs=ref_log_probs, loss_mask=loss_mask)
    reduction = Reduction(aggregation, group_ids, segment_ids, normalizer).checked(np.shape(log_probs))
    mask = masked.counted(loss_mask, segment_ids)
    log_ratio = select(mask, ref_log_probs) - jnp.where(mask, jnp.asarray(log_probs), 0).astype(jnp.float32)
    return reduction.reduce(estimators[estimator](log_ratio), mask)


def truncated_importance_weights(old_log_probs: ArrayLike, rollout_log_probs: ArrayLike, cap: float = 2.0) -> Array:
    """The engine correction sg(min(pi_old / pi_rollout, cap)) of any shape, for `token_weights`.

    Both are log-probs of the same tokens before the first update: by the trainer and as the sampler recorded them. Not for a ratio
    that is anchored on the rollout (old_log_probs = rollout_log_probs): that one holds the factor already.
    """
    if np.shape(old_log_probs) != np.shape(rollout_log_probs):
        raise ValueError(f"rollout_log_probs must be {np.shape(old_log_probs)}, got {np.shape(rollout_log_probs)}")
    if cap is None:
        raise ValueError("cap is None; valid: a number > 0")
    _checked(None, cap, names=("", "cap"))
    log_ratio = jnp.asarray(old_log_probs, jnp.float32) - jnp.asarray(rollout_log_probs, jnp.float32)
    return stop_gradient(jnp.minimum(_exp(log_ratio, log_ratio), cap)).astype(jnp.float32)


def policy_ratio(log_probs: ArrayLike, old_log_probs: ArrayLike, mask: Array) -> Array:
    """r of Eq. 1 [B, T] in float32, its log clipped to +-80, not differentiated; 1 where `mask` is false."""
    log_ratio = select(mask, log_probs) - select(mask, old_log_probs)
    return _exp(log_ratio, log_ratio)


def dropped_by_ppo(ratio: Array, advantages: Array, mask_clip: Clip) -> Array:
    """Where PPO's minimum picks the clipped term, i.e. 1 - M of Eq. 5 (strict inequalities)."""
    low, high = _bounds(mask_clip)
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


def _loss(
    row: _Row,
    reduction: Reduction,
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    loss_mask: ArrayLike,
    token_weights: ArrayLike | None,
) -> LossOutput:
    constants = {"old_log_probs": old_log_probs, "advantages": advantages, "token_weights": token_weights}
    masked.check_arrays(np.shape(log_probs), loss_mask=loss_mask, **constants)
    reduction = reduction.checked(np.shape(log_probs))

    mask = masked.counted(loss_mask, reduction.segment_ids)
    log_probs = jnp.where(mask, jnp.asarray(log_probs), 0).astype(jnp.float32)
    advantages = select(mask, advantages)

    log_ratio = stop_gradient(log_probs) - select(mask, old_log_probs)
    if row.sequence_ratio:
        log_ratio = masked.response_mean(log_ratio, mask, reduction.segment_ids)
    ratio = _exp(log_ratio, log_probs)
    value = stop_gradient(ratio)
    low, high = _bounds(row.weight_clip)
    dropped = mask & dropped_by_ppo(value, advantages, row.mask_clip)
    weight = jnp.where(dropped, 0, jnp.clip(value, low, high))

    surrogate = weight * log_probs
    if row.ratio_is_surrogate:
        surrogate = jnp.where(dropped, jnp.clip(value, *_bounds(row.mask_clip)), ratio)
    terms = surrogate * advantages  # last, so that PPO's gradient and the mask form's are equal bit for bit
    if token_weights is not None:
        terms = terms * select(mask, token_weights)
    metrics = {
        "ratio_mean": masked.masked_mean(value, mask),
        "ratio_max": masked.masked_max(value, mask),
        "weight_mean": masked.masked_mean(weight, mask),
        "dropped": masked.masked_mean(dropped, mask),
        "at_cap": masked.masked_mean(~dropped & (value > high), mask),
        "at_floor": masked.masked_mean(~dropped & (value < low), mask),
    }
    return reduction.reduce(-terms, mask), metrics


def _limit(log_ratio: Array) -> Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@jax.custom_jvp
def _exp(log_ratio: Array, log_probs: Array) -> Array:
    """exp of the clipped log ratio, a constant; but its derivative by `log_probs` is itself, also at and beyond +-80."""
    del log_probs
    return jnp.exp(_limit(log_ratio))


@_exp.defjvp
def _exp_jvp(primals, tangents):
    ratio = _exp(*primals)
    return ratio, ratio * tangents[1]


@jax.custom_jvp
def _k3(d: Array) -> Array:
    # expm1(d) - d cancels near 0; the series to d^6 is exact to float32 below 0.1.
    series = d**2 * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    return jnp.where(jnp.abs(d) < 0.1, series, jnp.expm1(_limit(d)) - d)


@_k3.defjvp
def _k3_jvp(primals, tangents):
    # By autodiff exp(d) - 1 would lose all digits near d = 0, where a policy that has just started is.
    return _k3(*primals), jnp.expm1(_limit(primals[0])) * tangents[0]


def _bounds(clip: Clip) -> tuple[ArrayLike, ArrayLike]:
    low, high = clip
    # float32 also of a float64 number under x64, so that the loss stays float32.
    return (
        -jnp.inf if low is None else jnp.asarray(1 - low, jnp.float32),
        jnp.inf if high is None else jnp.asarray(1 + high, jnp.float32),
    )


def _pair(name: str, clip: Clip | None) -> Clip:
    if clip is None:
        return None, None
    if not isinstance(clip, tuple | list) or len(clip) != 2:
        raise ValueError(f"{name} must be None or a pair (epsilon_low, epsilon_high) of numbers or None; got {clip!r}")
    return _checked(*clip, names=(f"{name}[0]", f"{name}[1]"))


def _checked(low: Epsilon, high: Epsilon, names: tuple[str, str] = ("epsilon_low", "epsilon_high")) -> Clip:
    for name, value, valid in ((names[0], low, np.greater_equal), (names[1], high, np.greater)):
        if value is None or isinstance(value, Tracer):  # what is traced is not known here
            continue
        if not masked.is_real(value) or not np.all(valid(np.asarray(value), 0)):
            least = "> 0" if valid is np.greater else ">= 0"
            raise ValueError(f"{name} is {value!r}; valid: a number {least}, or None for no bound")
    return low, high
