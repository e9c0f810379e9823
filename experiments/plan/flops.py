"""Floating-point operations of the programs by formula: a compiler's own count has the body of a loop once.

One multiplication and one addition for each weight and token; attention as the program computes it, which by blocks skips most of
what causality rules out. Norms, rotary positions, softmax and the optimizer are left out: below one per cent at the sizes that matter.
"""

from __future__ import annotations

from cispo_jax.models import TransformerConfig
from cispo_jax.models.attention import BLOCK, LEAST_PART, PARTS


def scores(T: int) -> int:
    """Query-key pairs that attention over rows of T columns computes for each head, where no packed segment ends before."""
    if T > BLOCK:
        blocks = -(-T // BLOCK)
        return blocks * (blocks + 1) // 2 * BLOCK * BLOCK
    size = -(-T // min(PARTS, -(-T // LEAST_PART)))
    return sum((min(start + size, T) - start) * min(start + size, T) for start in range(0, T, size))


def layer(config: TransformerConfig, place: int, tokens: int, pairs: int) -> int:
    """Forward pass of one layer over `tokens` tokens with `pairs` query-key pairs of softmax attention."""
    attention, mlp = config.kinds(place)
    D, N, M, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
    if attention == "softmax":
        total = 2 * tokens * D * H * (2 * N + 2 * M) + 4 * pairs * N * H
    else:
        block = min(config.lightning_block, max(tokens, 1))
        total = 2 * tokens * D * H * 5 * N + 4 * tokens * N * H * (block + H)
    if mlp == "dense":
        return total + 6 * tokens * D * config.mlp_dim
    shared = config.shared_expert_dim
    return (
        total
        + 2 * tokens * D * config.num_experts
        + 6 * tokens * D * (config.experts_per_token * config.expert_dim + shared)
    )


def layers(config: TransformerConfig, tokens: int, pairs: int) -> int:
    """Forward pass of all layers."""
    return sum(layer(config, i, tokens, pairs) for i in range(config.num_layers))


def head(config: TransformerConfig, tokens: int) -> int:
    """Logits of `tokens` tokens."""
    return 2 * tokens * config.embed_dim * config.vocab_size


def train_step(config: TransformerConfig, *, rows: int, columns: int, targets: int, remat: str) -> int:
    """An update on `rows` full rows of `columns` tokens, `targets` of them predicted: backward twice the forward, and what `remat` computes
    again. The fused head computes its logits again in the backward pass, so it counts 4 times.
    """
    pairs = rows * scores(columns)
    forward = layers(config, rows * columns, pairs)
    again = {"off": 0, "full": forward, "attention": layers(config, 0, pairs)}[remat]
    return 3 * forward + again + 4 * head(config, rows * targets)


def prefill(config: TransformerConfig, *, prompts: int, prompt: int, rows: int) -> int:
    return layers(config, prompts * prompt, prompts * scores(prompt)) + head(config, rows)


def decode_token(config: TransformerConfig, *, rows: int, columns: int) -> int:
    """One token of every row, over a cache of `columns` columns (all are computed, seen or not)."""
    total = sum(layer(config, i, rows, rows * columns) for i in range(config.num_layers)) + head(config, rows)
    lightning = sum(config.kinds(i)[0] == "lightning" for i in range(config.num_layers))
    # The recurrent form: a state of H x H a head moves on and is read.
    per_layer = 4 * rows * config.num_heads * config.head_dim
    return total - lightning * per_layer * min(config.lightning_block, rows)
