"""The architecture of a decoder as one frozen dataclass, and named presets from 1M parameters up."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder: per layer a kind of attention and a kind of feed-forward, RMSNorm, RoPE; tied or untied head.

    `attention` and `mlp` hold one period of kinds: layer i has `attention[i % len(attention)]`. Their least common period divides
    `num_layers`; layers at the same place of the period are stacked.
    """

    vocab_size: int  # V
    embed_dim: int  # D
    num_layers: int  # L
    num_heads: int  # N, query heads
    num_kv_heads: int  # M, key heads of softmax attention; divides N
    head_dim: int  # H
    mlp_dim: int  # F of a dense feed-forward
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_head: bool = True
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    rotary_dim: int | None = None  # leading dimensions of a head that rotate; None = all
    attention: tuple[str, ...] = ("softmax",)  # softmax | lightning
    mlp: tuple[str, ...] = ("dense",)  # dense | moe
    num_experts: int = 0  # E
    experts_per_token: int = 0  # K
    expert_dim: int = 0  # F of one expert
    normalize_gates: bool = True  # the gates of the K chosen experts sum to 1
    postnorm: bool = False  # the residual branches off after the norm, not before it (MiniMax)
    softmax_residual: tuple[float, float] = (1.0, 1.0)  # (alpha, beta): alpha x residual + beta x output
    lightning_residual: tuple[float, float] = (1.0, 1.0)
    mlp_residual: tuple[float, float] = (1.0, 1.0)
    lightning_block: int = 256  # tokens of a chunk of lightning attention; does not change the result
    # Not of the architecture, kept for writing the model as it was read:
    file_dtype: str = "float32"  # of the tensors in the file
    context_length: int | None = None  # tokens it was made for, None = not known; nothing enforces it

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim={rotary_dim} must be even and at most head_dim={self.head_dim}: RoPE rotates pairs"
            )
        for name, valid in (("attention", ("softmax", "lightning")), ("mlp", ("dense", "moe"))):
            unknown = set(getattr(self, name)) - set(valid)
            if unknown or not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)}: the kinds are {' and '.join(valid)}")
        if self.num_layers % self.period:
            raise ValueError(
                f"num_layers={self.num_layers} is not a multiple of the period {self.period} of attention and mlp"
            )
        if "moe" in self.mlp and not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must be 1 to num_experts={self.num_experts}")

    @property
    def period(self) -> int:
        """Layers until the kinds repeat."""
        return math.lcm(len(self.attention), len(self.mlp))

    def kinds(self, layer: int) -> tuple[str, str]:
        """The kinds of attention and of feed-forward of a layer."""
        return self.attention[layer % len(self.attention)], self.mlp[layer % len(self.mlp)]


PRESETS: dict[str, TransformerConfig] = {
    "debug": TransformerConfig(32, 32, 2, 4, 2, 8, 64),  # about 20k parameters: tests
    "tiny": TransformerConfig(64, 128, 4, 4, 2, 32, 512),  # about 1M
    "small": TransformerConfig(64, 192, 6, 6, 3, 32, 768),  # about 3M
    # HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": TransformerConfig(49_152, 576, 30, 9, 3, 64, 1_536, rope_theta=100_000.0),
}
