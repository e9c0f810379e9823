"""Mixture of experts: a float32 router, and the experts' feed-forwards of the tokens that chose them.

Whatever computes the experts is a function (experts, tokens [T, D], gates [T, K], expert_ids [T, K]) -> tokens [T, D];
`dense_experts` is the plain reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from cispo_jax.models.config import TransformerConfig
from cispo_jax.models.layers import normal, swiglu
from cispo_jax.sharding import param


class MoeMlp(nnx.Module):
    """The gated sum of the SwiGLU feed-forwards of the K experts that the router gives the highest probability."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        D, E, F = config.embed_dim, config.num_experts, config.expert_dim
        self.experts_per_token, self.normalize_gates = config.experts_per_token, config.normalize_gates
        keys = jax.random.split(key, 4)
        self.router = param(keys[0], normal, (D, E), ("embed", None))
        self.gate = param(keys[1], normal, (E, D, F), ("expert", "embed", "mlp"))
        self.up = param(keys[2], normal, (E, D, F), ("expert", "embed", "mlp"))
        self.down = param(keys[3], normal, (E, F, D), ("expert", "mlp", "embed"))

    def __call__(self, x_BTD: jax.Array, expert_ids_BTK: jax.Array | None = None) -> jax.Array:
        """Output [B, T, D]. `expert_ids_BTK` replays a selection; a token with an id that is no expert's is routed anew."""
        tokens_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        given_TK = None if expert_ids_BTK is None else expert_ids_BTK.reshape(-1, self.experts_per_token)
        gates_TK, expert_ids_TK = self.route(tokens_TD, given_TK)
        return dense_experts(self, tokens_TD, gates_TK, expert_ids_TK).reshape(x_BTD.shape)

    def route(self, tokens_TD: jax.Array, given_TK: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Gates [T, K] in float32 and expert ids [T, K]. The gates are today's router's, also for a given selection.

        softmax over all experts at the chosen ones, which then sum to 1 if `normalize_gates` (that is softmax over the chosen logits).
        """
        logits_TE = jnp.matmul(
            tokens_TD.astype(jnp.float32), self.router[...].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        _, expert_ids_TK = jax.lax.top_k(logits_TE, self.experts_per_token)
        if given_TK is not None:
            given_TK = given_TK.astype(jnp.int32)
            recorded_T = jnp.all((given_TK >= 0) & (given_TK < logits_TE.shape[-1]), axis=-1, keepdims=True)
            expert_ids_TK = jnp.where(recorded_T, given_TK, expert_ids_TK)
        scores_TE = logits_TE if self.normalize_gates else jax.nn.softmax(logits_TE, axis=-1)
        gates_TK = jnp.take_along_axis(scores_TE, expert_ids_TK, axis=-1)
        return (jax.nn.softmax(gates_TK, axis=-1) if self.normalize_gates else gates_TK), expert_ids_TK


def dense_experts(experts: MoeMlp, tokens_TD: jax.Array, gates_TK: jax.Array, expert_ids_TK: jax.Array) -> jax.Array:
    """Every expert on every token, one expert at a time: [T, F] is held, never [T, E, F]; the sum is float32."""

    @jax.checkpoint
    def weighted(expert, weights):
        gate_T = jnp.sum(jnp.where(expert_ids_TK == expert, gates_TK, 0), axis=-1)
        return gate_T[:, None] * swiglu(tokens_TD, *weights).astype(jnp.float32)

    weights = (experts.gate[...], experts.up[...], experts.down[...])
    indices = jnp.arange(len(weights[0]))
    total, _ = jax.lax.scan(
        lambda total, one: (total + weighted(*one), None), jnp.zeros(tokens_TD.shape, jnp.float32), (indices, weights)
    )
    return total.astype(tokens_TD.dtype)
