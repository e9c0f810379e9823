"""Mixture of experts: a float32 router, and the feed-forwards of the experts that it chooses for each token.

Whatever computes the experts is a function (weights, tokens [T, D], gates [T, K], expert_ids [T, K]) -> tokens [T, D], where an id of
`NO_EXPERT` chooses none: `dispatch.expert_outputs`, and `dense_experts` as its plain reference.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from cispo_jax.models.cache import NO_EXPERT
from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.dispatch import Experts, expert_outputs
from cispo_jax.models.layers import Mlp, normal, swiglu
from cispo_jax.sharding import param


class Routing(NamedTuple):
    """What the routers did: sums over tokens, so that devices, micro-batches and updates add up; layers are the leading axis."""

    expert_ids_BTK: jax.Array  # int16, NO_EXPERT at pads
    load_E: jax.Array  # tokens that chose the expert; each chooses K
    probs_E: jax.Array  # sum of the router's probabilities
    z: jax.Array  # sum of logsumexp(logits)^2
    recorded_BT: jax.Array  # tokens that have a given selection
    replaced_BT: jax.Array  # of these, the ones that the router would give another today


class MoeMlp(nnx.Module):
    """The gated sum of the SwiGLU feed-forwards of the K experts with the highest scores, and of a shared one that all tokens take."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        D, E, F = config.embed_dim, config.num_experts, config.expert_dim
        self.experts_per_token, self.normalize_gates = config.experts_per_token, config.normalize_gates
        self.router_scores = config.router_scores
        keys = jax.random.split(key, 5)
        self.router = param(keys[0], normal, (D, E), ("embed", None))
        self.gate = param(keys[1], normal, (E, D, F), ("expert", "expert_embed", "mlp"))
        self.up = param(keys[2], normal, (E, D, F), ("expert", "expert_embed", "mlp"))
        self.down = param(keys[3], normal, (E, F, D), ("expert", "mlp", "expert_embed"))
        if config.shared_expert_dim:
            self.shared = Mlp(config, key=keys[4], mlp_dim=config.shared_expert_dim)

    def __call__(
        self, x_BTD: jax.Array, weight_BT: jax.Array | None = None, expert_ids_BTK: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """Output [B, T, D] and what the router did.

        Args:
          weight_BT: how often a token counts in the sums of `Routing` (a prompt computed once for G responses: G); 0 at pads, which
            no expert computes. None: 1.
          expert_ids_BTK: a selection to take in place of the router's; a token with an id that is no expert's is routed anew.
        """
        (B, T, D), K = x_BTD.shape, self.experts_per_token
        tokens_TD = x_BTD.reshape(-1, D)
        weight_T = jnp.ones(B * T) if weight_BT is None else weight_BT.reshape(-1).astype(jnp.float32)
        given_TK = None if expert_ids_BTK is None else expert_ids_BTK.reshape(-1, K)
        gates_TK, chosen_TK, recorded_T, replaced_T, probs_TE, logits_TE = self.route(tokens_TD, given_TK)
        chosen_TK = jnp.where(weight_T[:, None] > 0, chosen_TK, NO_EXPERT)
        output_TD = expert_outputs(
            Experts(self.gate[...], self.up[...], self.down[...]), tokens_TD, gates_TK, chosen_TK
        )
        if hasattr(self, "shared"):
            output_TD = output_TD + self.shared(tokens_TD)[0]
        one_hot_TE = jnp.sum(chosen_TK[:, :, None] == jnp.arange(probs_TE.shape[1])[None, None], axis=1)
        return output_TD.reshape(x_BTD.shape), Routing(
            expert_ids_BTK=chosen_TK.astype(jnp.int16).reshape(B, T, K),
            load_E=weight_T @ one_hot_TE.astype(jnp.float32),
            probs_E=weight_T @ jnp.where(weight_T[:, None] > 0, probs_TE, 0),
            z=weight_T @ jnp.where(weight_T > 0, jnp.square(jax.nn.logsumexp(logits_TE, axis=-1)), 0),
            recorded_BT=(recorded_T & (weight_T > 0)).reshape(B, T),
            replaced_BT=(replaced_T & (weight_T > 0)).reshape(B, T),
        )

    def route(self, tokens_TD: jax.Array, given_TK: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """Gates [T, K] and ids [T, K] of the experts with the highest scores, or of those given; the gates are today's in either case.

        Then which tokens [T] have a given selection, which of them would have taken another, and probabilities and logits [T, E]. The
        probabilities are softmax of the logits or, with `router_scores="sigmoid"`, their sigmoids divided by the sum over experts. All
        is float32.
        """
        logits_TE = jnp.matmul(
            tokens_TD.astype(jnp.float32), self.router[...].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        if self.router_scores == "softmax":
            probs_TE = jax.nn.softmax(logits_TE, axis=-1)
        else:
            scores_TE = jax.nn.sigmoid(logits_TE)
            probs_TE = scores_TE / jnp.sum(scores_TE, axis=-1, keepdims=True)
        _, chosen_TK = jax.lax.top_k(logits_TE, self.experts_per_token)
        recorded_T = replaced_T = jnp.zeros(len(tokens_TD), bool)
        if given_TK is not None:
            given_TK = given_TK.astype(jnp.int32)
            recorded_T = jnp.all((given_TK >= 0) & (given_TK < logits_TE.shape[1]), axis=-1)
            # The order of the K experts means nothing.
            replaced_T = recorded_T & jnp.any(jnp.sort(chosen_TK, axis=-1) != jnp.sort(given_TK, axis=-1), axis=-1)
            chosen_TK = jnp.where(recorded_T[:, None], given_TK, chosen_TK)
        return self.gates(logits_TE, chosen_TK), chosen_TK, recorded_T, replaced_T, probs_TE, logits_TE

    def gates(self, logits_TE: jax.Array, expert_ids_TK: jax.Array) -> jax.Array:
        """The scores of the chosen experts; divided by their sum if `normalize_gates` (of softmax: softmax over the chosen logits)."""
        chosen_TK = jnp.take_along_axis(logits_TE, expert_ids_TK, axis=-1)
        if self.router_scores == "softmax" and self.normalize_gates:
            return jax.nn.softmax(chosen_TK, axis=-1)
        if self.router_scores == "softmax":
            return jnp.exp(chosen_TK - jax.nn.logsumexp(logits_TE, axis=-1, keepdims=True))
        scores_TK = jax.nn.sigmoid(chosen_TK)
        return scores_TK / jnp.sum(scores_TK, axis=-1, keepdims=True) if self.normalize_gates else scores_TK


def dense_experts(experts: Experts, tokens_TD: jax.Array, gates_TK: jax.Array, expert_ids_TK: jax.Array) -> jax.Array:
    """Every expert on every token, one expert at a time: [T, F] is held, never [T, E, F]; the sum is float32."""

    @jax.checkpoint
    def weighted(expert, weights):
        gate_T = jnp.sum(jnp.where(expert_ids_TK == expert, gates_TK, 0), axis=-1)
        return gate_T[:, None] * swiglu(tokens_TD, *weights).astype(jnp.float32)

    indices = jnp.arange(len(experts.gate_EDF))
    total, _ = jax.lax.scan(
        lambda total, one: (total + weighted(*one), None), jnp.zeros(tokens_TD.shape, jnp.float32), (indices, experts)
    )
    return total.astype(tokens_TD.dtype)
