"""The architecture of a decoder as one frozen dataclass, and named presets from 1M parameters up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerConfig:
    """A Llama-family decoder: GQA, RoPE, SwiGLU, RMSNorm; optional QK norm and QKV biases; tied or untied head."""

    vocab_size: int  # V
    embed_dim: int  # D
    num_layers: int  # L
    num_heads: int  # N, query heads
    num_kv_heads: int  # M, key heads; divides N
    head_dim: int  # H
    mlp_dim: int  # F
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_head: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")


PRESETS: dict[str, TransformerConfig] = {
    "debug": TransformerConfig(32, 32, 2, 4, 2, 8, 64),  # about 20k parameters: tests
    "tiny": TransformerConfig(64, 128, 4, 4, 2, 32, 512),  # about 1M
    "small": TransformerConfig(64, 192, 6, 6, 3, 32, 768),  # about 3M
    # HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": TransformerConfig(49_152, 576, 30, 9, 3, 64, 1_536, rope_theta=100_000.0),
}
