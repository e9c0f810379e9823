"""SmolLM2-135M-Instruct on a mixture of three reasoning-gym tasks, answers in boxes and judged by the verifier of mathematics.

python -m experiments.train --config=configs/smollm2_math_mixture.py --workdir=runs/math_mixture
"""

import os

from cispo_jax.config import default_config
from configs.common import models, recipes

TWO = {"min_terms": 2, "max_terms": 2, "min_digits": 1}


def get_config():
    config = default_config()
    models.smollm2_135m(config)
    recipes.sixteen_updates(config)
    config.num_steps = 40
    config.data.source = "mixture"
    config.data.tasks.sums = {"source": "reasoning_gym:chain_sum", "options": TWO | {"max_digits": 2}}
    config.data.tasks.products = {
        "source": "reasoning_gym:products",
        "options": TWO | {"max_digits": 1},
        "eval_size": 24,
    }
    config.data.tasks.gcd = {
        "source": "reasoning_gym:gcd",
        "options": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 30},
    }
    config.data.train_size = 512
    config.data.eval_size = 64
    config.data.template = os.path.join(os.path.dirname(__file__), "common", "boxed.jinja")
    config.data.prompt_suffix = "\nPut the answer in \\boxed{}."
    config.rewards.verifier = "math"
    config.rewards.format = "boxed"
    config.rewards.weights.format = 0.2
    config.sampling.max_new_tokens = 32
    config.evaluation.every = 20
    config.evaluation.num_problems = 0
    config.evaluation.samples = 4
    config.checkpoint.every = 20
    return config
