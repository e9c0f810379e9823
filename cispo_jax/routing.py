"""Losses and metrics of mixture-of-experts routers, from sums over tokens that micro-batches, devices and updates add up to."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient


class RouterSums(NamedTuple):
    """Over the real tokens of a batch; L layers that have experts. Add two with `plus`."""

    load_LE: Array  # tokens that chose the expert
    probs_LE: Array  # sum of the router's probabilities
    z_L: Array  # sum of logsumexp(logits)^2
    tokens: Array  # how many
    replaced: Array  # (token, layer) pairs with a given selection that the router would not make today
    replaced_tokens: Array  # tokens with such a selection in at least one layer
    recorded_tokens: Array  # tokens with a given selection

    def plus(self, other: "RouterSums") -> "RouterSums":
        return RouterSums(*(a + b for a, b in zip(self, other, strict=True)))


def load_balance_loss(sums: RouterSums, whole: RouterSums | None = None) -> Array:
    """E sum_e f_e P_e, mean over layers: f_e the share of selections that went to expert e, P_e the mean of its probability.

    Switch Transformer (arXiv:2101.03961) Eq. 4, with selections divided by K: 1 when balanced whatever K is (transformers' formula
    gives K). The gradient flows through P alone. With `whole`, the sums of the batch that `sums` is a part of, f and the number of
    tokens are the whole's, so that the parts' losses add up to it.
    """
    whole = sums if whole is None else whole
    E = sums.load_LE.shape[1]
    share_LE = stop_gradient(whole.load_LE / jnp.maximum(whole.load_LE.sum(axis=1, keepdims=True), 1))
    return jnp.mean(E * jnp.sum(share_LE * sums.probs_LE, axis=1)) / jnp.maximum(stop_gradient(whole.tokens), 1)


def router_z_loss(sums: RouterSums, whole: RouterSums | None = None) -> Array:
    """Mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, Eq. 5); `whole`: see `load_balance_loss`."""
    whole = sums if whole is None else whole
    return jnp.mean(sums.z_L) / jnp.maximum(stop_gradient(whole.tokens), 1)


def router_metrics(sums: RouterSums) -> dict[str, Array]:
    """Scalars to log.

    `moe/balance_loss`, `moe/z_loss`: the losses above without their coefficients. `moe/max_violation`: max_e load_e / mean load - 1 of
    the worst layer (arXiv:2408.15664). `moe/load/e000`, ...: load of an expert over all layers, 1 = balanced. `moe/replaced`,
    `moe/replaced_tokens`: of the replayed selections, the share of (token, layer) pairs, and of tokens in at least one layer, that the
    router would have made otherwise.
    """
    L, E = sums.load_LE.shape
    relative_LE = E * sums.load_LE / jnp.maximum(sums.load_LE.sum(axis=1, keepdims=True), 1)
    recorded = jnp.maximum(sums.recorded_tokens, 1)
    metrics = {
        "moe/balance_loss": load_balance_loss(sums),
        "moe/z_loss": router_z_loss(sums),
        "moe/max_violation": jnp.max(relative_LE) - 1,
        "moe/replaced": sums.replaced / (recorded * L),
        "moe/replaced_tokens": sums.replaced_tokens / recorded,
    }
    return metrics | {f"moe/load/e{e:03d}": load for e, load in enumerate(relative_LE.mean(axis=0))}
