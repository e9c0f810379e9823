"""The parts of a decoder layer that are not attention: RMSNorm, rotary positions, the SwiGLU feed-forward.

Parameters are float32 masters; each part computes in the dtype of its input, norms and rotary angles in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from cispo_jax.models.config import TransformerConfig
from cispo_jax.sharding import param

normal = jax.nn.initializers.normal(0.02)
ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) x scale over the last axis, in float32 (Zhang & Sennrich, arXiv:1910.07467)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * jnp.expand_dims(scale, range(x.ndim - scale.ndim))).astype(x.dtype)


def rotary_angles(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, H/2] of position x frequency (RoPE, arXiv:2104.09864), once for all layers."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2): the half-split layout of Hugging Face checkpoints."""
    cos, sin = rotary
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


class Mlp(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x) (arXiv:2002.05202)."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array):
        D, F = config.embed_dim, config.mlp_dim
        keys = jax.random.split(key, 3)
        self.gate = param(keys[0], normal, (D, F), ("embed", "mlp"))
        self.up = param(keys[1], normal, (D, F), ("embed", "mlp"))
        self.down = param(keys[2], normal, (F, D), ("mlp", "embed"))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate, up, down = (w[...].astype(x_BTD.dtype) for w in (self.gate, self.up, self.down))
        return (jax.nn.silu(x_BTD @ gate) * (x_BTD @ up)) @ down
