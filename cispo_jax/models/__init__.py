"""Models: a decoder as an NNX pytree (Llama, Qwen, Mixtral, MiniMax), its presets, and `forward`."""

from cispo_jax import _requires_train  # noqa: F401
from cispo_jax.models.cache import Cache
from cispo_jax.models.config import PRESETS, TransformerConfig
from cispo_jax.models.transformer import (
    REMAT,
    ParameterCounts,
    Transformer,
    count_parameters,
    decode_step,
    expert_ids,
    forward,
    head_matrix,
    hidden_states,
    prefill,
    router_sums,
    segment_positions,
)

__all__ = [
    "PRESETS",
    "REMAT",
    "Cache",
    "ParameterCounts",
    "Transformer",
    "TransformerConfig",
    "count_parameters",
    "decode_step",
    "expert_ids",
    "forward",
    "head_matrix",
    "hidden_states",
    "prefill",
    "router_sums",
    "segment_positions",
]
