"""Sampling: groups of responses, their log-probs and finish reasons."""

from cispo_jax import _requires_train  # noqa: F401
from cispo_jax.sampling.decode import sample_groups

__all__ = ["sample_groups"]
