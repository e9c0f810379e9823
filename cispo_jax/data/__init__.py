"""Data: problems to train and evaluate on, their prompts and their order. Plain Python and NumPy, no jax.

An example is a dict with at least `id`, `prompt` and `answer` (all `str`), optionally `response` (a demonstration for
supervised warm starts) and whatever its scorer needs.
"""

from cispo_jax import _requires_train  # noqa: F401
from cispo_jax.data.loading import Example, Problems, from_examples, load, load_evaluation
from cispo_jax.data.prompts import Prompter
from cispo_jax.data.stream import PromptStream

__all__ = ["Example", "Problems", "PromptStream", "Prompter", "from_examples", "load", "load_evaluation"]
