"""The architecture of a decoder as one frozen dataclass, and named presets from 1M parameters up."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any


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
    router_scores: str = "softmax"  # over all experts | sigmoid of each logit
    shared_expert_dim: int = 0  # F of an expert that every token takes; 0 = none
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
        if self.router_scores not in ("softmax", "sigmoid"):
            raise ValueError(f"router_scores={self.router_scores!r}: the kinds are softmax and sigmoid")
        if "moe" in self.mlp and not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must be 1 to num_experts={self.num_experts}")

    @property
    def period(self) -> int:
        """Layers until the kinds repeat."""
        return math.lcm(len(self.attention), len(self.mlp))

    @property
    def runs(self) -> list[list[int]]:
        """The places of one period, neighbours of equal kinds together."""
        return [list(run) for _, run in itertools.groupby(range(self.period), self.kinds)]

    def kinds(self, layer: int) -> tuple[str, str]:
        """The kinds of attention and of feed-forward of a layer."""
        return self.attention[layer % len(self.attention)], self.mlp[layer % len(self.mlp)]


_QWEN25: dict[str, Any] = {"rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True}
_QWEN3: dict[str, Any] = {"rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}
_M1_RESIDUAL = (3.5565588200778455, 1.0)

PRESETS: dict[str, TransformerConfig] = {
    "debug": TransformerConfig(32, 32, 2, 4, 2, 8, 64),  # about 20k parameters: tests
    "tiny": TransformerConfig(64, 128, 4, 4, 2, 32, 512),  # about 1M
    "tiny-moe": TransformerConfig(  # about 3.4M, of which a token meets 1.0M
        64, 128, 4, 4, 2, 32, 512, mlp=("moe",), num_experts=8, experts_per_token=2, expert_dim=256
    ),
    "small": TransformerConfig(64, 192, 6, 6, 3, 32, 768),  # about 3M
    # HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": TransformerConfig(49_152, 576, 30, 9, 3, 64, 1_536, rope_theta=100_000.0),
    # Qwen/Qwen2.5-0.5B and so on; of 32B the published eps is 1e-5 (its Instruct: 1e-6)
    "qwen2.5-0.5b": TransformerConfig(151_936, 896, 24, 14, 2, 64, 4_864, **_QWEN25),
    "qwen2.5-1.5b": TransformerConfig(151_936, 1_536, 28, 12, 2, 128, 8_960, **_QWEN25),
    "qwen2.5-7b": TransformerConfig(152_064, 3_584, 28, 28, 4, 128, 18_944, tied_head=False, **_QWEN25),
    "qwen2.5-32b": TransformerConfig(152_064, 5_120, 64, 40, 8, 128, 27_648, tied_head=False, **_QWEN25 | {"norm_eps": 1e-5}),
    # Qwen/Qwen3-0.6B and so on
    "qwen3-0.6b": TransformerConfig(151_936, 1_024, 28, 16, 8, 128, 3_072, **_QWEN3),
    "qwen3-1.7b": TransformerConfig(151_936, 2_048, 28, 16, 8, 128, 6_144, **_QWEN3),
    "qwen3-8b": TransformerConfig(151_936, 4_096, 36, 32, 8, 128, 12_288, tied_head=False, **_QWEN3),
    "qwen3-32b": TransformerConfig(151_936, 5_120, 64, 64, 8, 128, 25_600, tied_head=False, **_QWEN3),
    "qwen3-30b-a3b": TransformerConfig(
        151_936, 2_048, 48, 32, 4, 128, 6_144, tied_head=False, mlp=("moe",), num_experts=128, experts_per_token=8,
        expert_dim=768, **_QWEN3,
    ),
    # MiniMaxAI/MiniMax-M1-40k and -80k; alpha is (2 L)^(1/4)
    "minimax-m1": TransformerConfig(
        200_064, 6_144, 80, 64, 8, 128, 9_216, rope_theta=1e7, rotary_dim=64, tied_head=False,
        attention=("lightning",) * 7 + ("softmax",), mlp=("moe",), num_experts=32, experts_per_token=2, expert_dim=9_216,
        postnorm=True, softmax_residual=_M1_RESIDUAL, lightning_residual=_M1_RESIDUAL, mlp_residual=_M1_RESIDUAL,
    ),
}  # fmt: skip
