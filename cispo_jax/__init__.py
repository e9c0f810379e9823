"""CISPO reinforcement learning of language models in JAX.

The functional API below is resolved on first use (PEP 562): `import cispo_jax` loads nothing else, the first use of a loss
loads jax and chex, and only the trainer needs flax, optax and orbax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cispo_jax.advantages import group_relative_advantages, rloo_advantages
    from cispo_jax.diagnostics import clip_sums, gradient_weights, rollout_mismatch
    from cispo_jax.log_probs import fused_token_log_probs, head_logits, token_log_probs
    from cispo_jax.objectives import (
        aggregation_weights,
        cispo_loss,
        dapo_loss,
        grpo_loss,
        gspo_loss,
        kl_penalty,
        ppo_loss,
        reinforce_loss,
        truncated_importance_weights,
        unified_loss,
    )

__version__ = "0.1.0"

__all__ = [
    "aggregation_weights",
    "cispo_loss",
    "clip_sums",
    "dapo_loss",
    "fused_token_log_probs",
    "gradient_weights",
    "group_relative_advantages",
    "grpo_loss",
    "gspo_loss",
    "head_logits",
    "kl_penalty",
    "ppo_loss",
    "reinforce_loss",
    "rloo_advantages",
    "rollout_mismatch",
    "token_log_probs",
    "truncated_importance_weights",
    "unified_loss",
]

_MODULE_OF = {
    **dict.fromkeys(("group_relative_advantages", "rloo_advantages"), "advantages"),
    **dict.fromkeys(("clip_sums", "gradient_weights", "rollout_mismatch"), "diagnostics"),
    **dict.fromkeys(("fused_token_log_probs", "head_logits", "token_log_probs"), "log_probs"),
}
_SUBMODULES = frozenset(
    "advantages config data diagnostics evaluation log_probs masked models objectives rewards sampling sharding trainer "
    "training types weights".split()
)


def __getattr__(name: str):
    # Only public names are looked up: `hasattr(cispo_jax, "_x")` must not load jax.
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'objectives')}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
