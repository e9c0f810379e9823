"""One update of the policy, jit-compiled and sharded: loss on micro-batches, gradient, optimizer, metrics.

The loss, the model and the optimizer are handed in. What the objective's stop-gradient protects is decided in `objectives.py`; here
every token's coefficient is computed once for the whole mini-batch, so that micro-batches and devices add up to it exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cispo_jax import diagnostics, masked
from cispo_jax.objectives import aggregation_weights, truncated_importance_weights
from cispo_jax.routing import RouterSums, load_balance_loss, router_z_loss
from cispo_jax.types import Batch, TrainState

# (model, tokens [B, S+T], padding mask [B, S+T], *, response_width=T, share, expert_ids) -> log-probs and entropy [B, T] of the response
# tokens, and what the routers did (None: no experts); the prompts of each run of `share` rows are equal and need to be computed once.
LogProbsFn = Callable[..., tuple[jax.Array, jax.Array, RouterSums | None]]


def init_state(model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(updates=jnp.int32(0), model=model, optimizer=optimizer.init(model))


def make_train_step(
    log_probs_fn: LogProbsFn,
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    aggregation: str,
    normalizer: float | None = None,
    group_size: int = 1,
    micro_batch_rows: int = 0,
    importance_cap: float | None = None,
    epsilon_high: float = 4.0,
    load_balance: float = 0.0,
    router_z: float = 0.0,
    shardings: Any = None,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict]]:
    """The compiled update `(state, batch, learning_rate) -> (state, metrics)`; the state is donated.

    Args:
      log_probs_fn: see `LogProbsFn`.
      loss_fn: an objective with the signature of `cispo_jax.cispo_loss`.
      aggregation, normalizer: see `aggregation_weights`.
      group_size: G; rows come in runs of G responses to one prompt.
      micro_batch_rows: rows of one forward and backward pass, a divisor of B; 0 = all.
      importance_cap: multiply terms by min(old / rollout, cap) (truncated importance sampling); None = off.
      epsilon_high: the cap that `clip/at_cap` reports on.
      load_balance, router_z: coefficients of the routers' losses (`cispo_jax.routing`), over all real tokens of the mini-batch.
      shardings: of the state, kept across steps.

    Returns:
      metrics: `loss`, `grad/norm`, `updates` (1, or 0 if no token trains and nothing moved), `sums` of (sum, count) pairs, and `router`
      (`RouterSums`, or None without experts).
    """

    def run(model, batch: Batch):
        B, T = batch.loss_mask.shape
        options = {"response_width": T, "share": math.gcd(B, group_size), "expert_ids": batch.expert_ids}
        return log_probs_fn(model, batch.tokens, batch.padding_mask, **options)

    def micro_loss(model, batch: Batch, coefficients_BT, whole: RouterSums | None):
        log_probs, entropy, router = run(model, batch)
        arrays = (log_probs, batch.old_log_probs, batch.advantages, batch.loss_mask)
        extra = {}
        if importance_cap is not None:
            extra["token_weights"] = truncated_importance_weights(
                batch.old_log_probs, batch.rollout_log_probs, importance_cap
            )
        with jax.named_scope("objective"):
            loss, _ = loss_fn(*arrays, aggregation=coefficients_BT, **extra)
            sums = diagnostics.clip_sums(*arrays, epsilon_high=epsilon_high)
            mask = masked.counted(batch.loss_mask)
            sums["policy/entropy"] = (masked.masked_sum(entropy, mask), masked.masked_count(mask))
        if router is not None and (load_balance or router_z):
            loss += load_balance * load_balance_loss(router, whole) + router_z * router_z_loss(router, whole)
        return loss, (sums, router)

    def train_step(state: TrainState, batch: Batch, rate: jax.Array):
        coefficients_BT = aggregation_weights(
            batch.loss_mask, aggregation=aggregation, group_ids=batch.group_ids, normalizer=normalizer
        )
        whole = None
        if (load_balance or router_z) and 0 < micro_batch_rows < len(batch.tokens):
            # What the routers do with the whole mini-batch must be known before the first gradient: one more forward pass.
            micros = jax.tree.map(lambda x: _split(x, micro_batch_rows, group_size), batch)
            sums = jax.lax.map(lambda micro: run(state.model, micro)[2], micros)
            whole = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        loss_of = functools.partial(micro_loss, whole=whole)
        loss, (sums, router), gradient = _accumulate(
            loss_of, state.model, batch, coefficients_BT, micro_batch_rows, group_size
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


def _accumulate(micro_loss, model, batch: Batch, coefficients_BT, rows: int, group_size: int):
    """Loss, sums and gradient of the mini-batch, `rows` rows at a time; they are sums, so micro-batches add up."""
    value_and_grad = jax.value_and_grad(micro_loss, has_aux=True)
    if not rows or rows == len(batch.tokens):
        (loss, sums), gradient = value_and_grad(model, batch, coefficients_BT)
        return loss, sums, gradient

    def add(carry, micro):
        (loss, sums), gradient = value_and_grad(model, *micro)
        total, (pooled, routers), accumulated = carry
        pooled = masked.add_sums(pooled, sums[0]), jax.tree.map(jnp.add, routers, sums[1])
        return (total + loss, pooled, jax.tree.map(jnp.add, accumulated, gradient)), None

    micros = jax.tree.map(lambda x: _split(x, rows, group_size), (batch, coefficients_BT))
    first = jax.tree.map(lambda x: x[0], micros)
    shapes = jax.eval_shape(lambda *micro: value_and_grad(model, *micro), *first)
    (zero, no_sums), no_gradient = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (loss, sums, gradient), _ = jax.lax.scan(add, (zero, no_sums, no_gradient), micros)
    return loss, sums, gradient


def _split(x: jax.Array, rows: int, group_size: int) -> jax.Array:
    """[B, ...] -> [B / rows, rows, ...]: whole groups (or parts of one) are dealt out in turn, so that each has rows of every device."""
    unit = math.gcd(rows, group_size)
    x = x.reshape(rows // unit, -1, unit, *x.shape[1:])
    return x.swapaxes(0, 1).reshape(-1, rows, *x.shape[3:])


def make_score_step(
    log_probs_fn: LogProbsFn, *, group_size: int = 1, micro_batch_rows: int = 0
) -> Callable[..., jax.Array]:
    """Log-probs [B, T] of rows under the current weights, a micro-batch at a time: the frozen denominator of the ratio."""

    def score_step(model, tokens, padding_mask, response_width: int, expert_ids=None):
        rows = micro_batch_rows or len(tokens)
        options = {"response_width": response_width, "share": math.gcd(rows, group_size)}
        indices = _split(jnp.arange(len(tokens)), rows, group_size)

        def score(i):
            tokens_i, mask_i, ids_i = jax.tree.map(lambda x: x[i], (tokens, padding_mask, expert_ids))
            return log_probs_fn(model, tokens_i, mask_i, expert_ids=ids_i, **options)[0]

        log_probs = jax.lax.map(score, indices)
        return jnp.zeros((len(tokens), response_width)).at[indices.ravel()].set(log_probs.reshape(-1, response_width))

    return jax.jit(score_step, static_argnums=3)
