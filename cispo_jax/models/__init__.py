"""Models: a Llama-family decoder as an NNX pytree, its presets, and `forward`."""

from cispo_jax import _requires_train  # noqa: F401
from cispo_jax.models.config import PRESETS, TransformerConfig
from cispo_jax.models.transformer import (
    Cache,
    Transformer,
    decode_step,
    forward,
    head_matrix,
    hidden_states,
    prefill,
    response_states,
    segment_positions,
)

__all__ = [
    "PRESETS",
    "Cache",
    "Transformer",
    "TransformerConfig",
    "decode_step",
    "forward",
    "head_matrix",
    "hidden_states",
    "prefill",
    "response_states",
    "segment_positions",
]
