"""Training: the optimizer, the jitted update, supervised warm starts, checkpoints and metrics."""

from cispo_jax import _requires_train  # noqa: F401
