"""The parts of a decoder layer that are not attention: RMSNorm, rotary positions, the SwiGLU feed-forward.

Parameters are float32 masters; each part computes in the dtype of its input, norms and rotary angles in float32.
"""

from __future__ import annotations

from typing import NamedTuple

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


def mix(residual: jax.Array, output: jax.Array, factors: tuple[float, float]) -> jax.Array:
    """alpha x residual + beta x output, in float32: bfloat16 would round 3.5566 to 3.5625."""
    alpha, beta = factors
    return (alpha * residual.astype(jnp.float32) + beta * output.astype(jnp.float32)).astype(residual.dtype)


class Span(NamedTuple):
    """What attention must know of the columns that it is given.

    A token sees those of its own segment up to itself, and all of the segment that is its prefix: the prompt that several responses
    share. A segment without a prefix names itself. Ids grow along a row, and segments that share a prefix follow it directly.
    """

    rotary: tuple[jax.Array, jax.Array]
    segment_BT: jax.Array  # int32: which segment of its row a token belongs to, 0 = pad
    prefix_BT: jax.Array | None  # the segment that it sees besides; None: no token has one
    index_BT: jax.Array  # tokens that it sees before itself
    kernel: str = "blocks"  # of softmax attention (`attention.attend`)


def rotary_angles(positions_BT: jax.Array, config: TransformerConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, R/2] of position x frequency (RoPE, arXiv:2104.09864), R the dimensions that rotate; once for all layers."""
    rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    frequencies = config.rope_theta ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angles = positions_BT.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + R/2) of the first R dimensions: the half-split layout of Hugging Face checkpoints."""
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = jnp.split(x_BTNH.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x_BTNH.dtype)


class Mlp(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x) (arXiv:2002.05202)."""

    def __init__(self, config: TransformerConfig, *, key: jax.Array, mlp_dim: int | None = None):
        D, F = config.embed_dim, config.mlp_dim if mlp_dim is None else mlp_dim
        keys = jax.random.split(key, 3)
        self.gate = param(keys[0], normal, (D, F), ("embed", "mlp"))
        self.up = param(keys[1], normal, (D, F), ("embed", "mlp"))
        self.down = param(keys[2], normal, (F, D), ("mlp", "embed"))

    def __call__(self, x_BTD: jax.Array, *routed: jax.Array | None) -> tuple[jax.Array, None]:
        """Output [..., D]; nothing is routed here."""
        return swiglu(x_BTD, self.gate[...], self.up[...], self.down[...]), None


def swiglu(x: jax.Array, *weights: jax.Array) -> jax.Array:
    gate, up, down = (w.astype(x.dtype) for w in weights)
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down
