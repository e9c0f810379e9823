"""CISPO reinforcement learning of language models in JAX.

The functional API below is resolved on first use (PEP 562): `import cispo_jax` loads nothing else, the first use of a loss
loads jax and chex, and only the trainer needs flax, optax and orbax.
"""

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` would cost more than all the rest here
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

_MODULE_OF = {  # the rest is in objectives
    "clip_sums": "diagnostics",
    "fused_token_log_probs": "log_probs",
    "gradient_weights": "diagnostics",
    "group_relative_advantages": "advantages",
    "head_logits": "log_probs",
    "rloo_advantages": "advantages",
    "rollout_mismatch": "diagnostics",
    "token_log_probs": "log_probs",
}
_SUBMODULES = {
    *("advantages", "config", "data", "diagnostics", "evaluation", "log_probs", "masked", "models", "objectives"),
    *("rewards", "sampling", "sharding", "trainer", "training", "types", "weights"),
}


def __getattr__(name: str):
    import importlib

    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:  # before any import: `hasattr(cispo_jax, "_x")` must not load jax
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'objectives')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
