"""One update of the policy, jit-compiled and sharded: loss on passes of packed rows, gradient, optimizer, metrics.

The loss, the model and the optimizer are handed in. What the objective's stop-gradient protects is decided in `objectives.py`; every
token brings its coefficient in the loss of the whole mini-batch along, so that passes and devices add up to it exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cispo_jax import diagnostics, masked
from cispo_jax.objectives import kl_penalty, truncated_importance_weights
from cispo_jax.routing import RouterSums, load_balance_loss, router_z_loss
from cispo_jax.types import Packed, TrainState

# (model, one pass of `Packed` rows: arrays [R, ...]) -> log-probs and entropy [R, Y] of the predicted tokens, and what the routers did
# (None: no experts).
LogProbsFn = Callable[[Any, Packed], tuple[jax.Array, jax.Array, RouterSums | None]]


def init_state(model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(updates=jnp.int32(0), model=model, optimizer=optimizer.init(model))


def make_train_step(
    log_probs_fn: LogProbsFn,
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    importance_cap: float | None = None,
    epsilon_high: float = 4.0,
    load_balance: float = 0.0,
    router_z: float = 0.0,
    kl: float = 0.0,
    kl_estimator: str = "k3",
    shardings: Any = None,
) -> Callable[[TrainState, Packed, jax.Array], tuple[TrainState, dict]]:
    """The compiled update `(state, mini-batch, learning_rate) -> (state, metrics)`; the state is donated.

    Args:
      log_probs_fn: see `LogProbsFn`.
      loss_fn: an objective with the signature of `cispo_jax.cispo_loss`.
      importance_cap: multiply terms by min(old / rollout, cap) (truncated importance sampling); None = off.
      epsilon_high: the cap that `clip/at_cap` reports on.
      load_balance, router_z: coefficients of the routers' losses (`cispo_jax.routing`), over the tokens of all passes.
      kl, kl_estimator: coefficient of the penalty for leaving the reference policy (`cispo_jax.kl_penalty`), weighted like the loss.
      shardings: of the state, kept across steps.

    Returns:
      metrics: `loss`, `grad/norm`, `updates` (1, or 0 if no token trains and nothing moved), `sums` of (sum, count) pairs, and `router`
      (`RouterSums`, or None without experts).
    """

    def loss_of_pass(model, rows: Packed, whole: RouterSums | None):
        log_probs, entropy, router = log_probs_fn(model, rows)
        arrays = (log_probs, rows.old_log_probs, rows.advantages, rows.loss_mask)
        extra = {}
        if importance_cap is not None:
            extra["token_weights"] = truncated_importance_weights(
                rows.old_log_probs, rows.rollout_log_probs, importance_cap
            )
        with jax.named_scope("objective"):
            loss, _ = loss_fn(*arrays, aggregation=rows.coefficients, segment_ids=rows.response_ids, **extra)
            sums = diagnostics.clip_sums(*arrays, epsilon_high=epsilon_high)
            mask = masked.counted(rows.loss_mask)
            if kl:
                assert rows.ref_log_probs is not None
                of_reference = (log_probs, rows.ref_log_probs, rows.loss_mask)
                penalty = functools.partial(
                    kl_penalty, *of_reference, estimator=kl_estimator, segment_ids=rows.response_ids
                )
                loss += kl * penalty(aggregation=rows.coefficients)
                sums["policy/kl_reference"] = (
                    penalty(aggregation="constant", normalizer=1.0),
                    masked.masked_count(rows.loss_mask),
                )
            sums["policy/entropy"] = (masked.masked_sum(entropy, mask), masked.masked_count(mask))
        if router is not None and (load_balance or router_z):
            loss += load_balance * load_balance_loss(router, whole) + router_z * router_z_loss(router, whole)
        return loss, (sums, router)

    def train_step(state: TrainState, batch: Packed, rate: jax.Array):
        whole = None
        if (load_balance or router_z) and len(batch.tokens) > 1:
            # What the routers do with the whole mini-batch must be known before the first gradient: one more forward pass.
            routed = lambda rows: log_probs_fn(state.model, rows)[2]
            whole = over_passes(routed, batch, lambda a, b: a.plus(b))
        value_and_grad = jax.value_and_grad(loss_of_pass, has_aux=True)
        (loss, (sums, router)), gradient = over_passes(
            lambda rows: value_and_grad(state.model, rows, whole), batch, _add
        )

        def move(state: TrainState) -> TrainState:
            direction, moments = optimizer.update(gradient, state.optimizer, state.model)
            model = jax.tree.map(lambda w, d: w - rate * d, state.model, direction)
            return TrainState(state.updates + 1, model, moments)

        # Without a trained token nothing moves: Adam would still step on a zero gradient.
        trained = jnp.any(batch.loss_mask)
        state = jax.lax.cond(trained, move, lambda state: state, state)
        metrics = {
            "loss": loss,
            "grad/norm": optax.tree.norm(gradient),
            "updates": trained.astype(jnp.int32),
            "sums": sums,
            "router": router,
        }
        return state, metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))


def _add(a: Any, b: Any) -> Any:
    """The values and gradients of two passes."""
    (loss_a, (sums_a, router_a)), gradient_a = a
    (loss_b, (sums_b, router_b)), gradient_b = b
    added = jax.tree.map(jnp.add, (loss_a, router_a, gradient_a), (loss_b, router_b, gradient_b))
    loss, router, gradient = added
    return (loss, (masked.add_sums(sums_a, sums_b), router)), gradient


def _pass(batch: Packed, index: int | jax.Array) -> Packed:
    take = lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
    return jax.tree.map(take, batch._replace(passes=None))


def over_passes(function: Callable[[Packed], Any], batch: Packed, add: Callable[[Any, Any], Any]) -> Any:
    """The sum of `function(rows)` over the passes that hold something; how many is known only when it runs."""
    if len(batch.tokens) == 1:
        return function(_pass(batch, 0))
    shapes = jax.eval_shape(function, _pass(batch, 0))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    with jax.named_scope(f"passes_{len(batch.tokens)}"):  # at most: the plan reads it
        return jax.lax.fori_loop(0, batch.passes, lambda i, total: add(total, function(_pass(batch, i))), zero)


def make_score_step(log_probs_fn: LogProbsFn) -> Callable[[Any, Packed], jax.Array]:
    """Log-probs [M, R, Y] of the predicted tokens under the current weights: the frozen denominator of the ratio."""

    def score_step(model, batch: Packed):
        def score(i, log_probs):
            return log_probs.at[i].set(log_probs_fn(model, _pass(batch, i))[0])

        return jax.lax.fori_loop(0, batch.passes, score, jnp.zeros(batch.targets.shape, jnp.float32))

    return jax.jit(score_step)
