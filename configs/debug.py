"""Seconds on a laptop CPU: random weights, sums of one digit, four rollout steps. For tests and for trying a change.

python -m experiments.train --config=configs/debug.py --workdir=runs/debug
"""

from cispo_jax.config import default_config
from configs.common import models, recipes, tasks


def get_config():
    config = default_config()
    models.from_nothing(config, "debug", "0123456789+-= ")
    tasks.sums(config, min_value=0, max_value=9, wording="{expression}=")
    recipes.four_updates(config, prompts_per_step=8, learning_rate=1e-3)
    config.num_steps = 4
    config.data.train_size = 64
    config.data.eval_size = 16
    config.data.max_prompt_tokens = 8
    config.sampling.max_new_tokens = 6
    config.evaluation.every = 2
    config.evaluation.num_problems = 16
    config.evaluation.samples = 2
    config.checkpoint.every = 1
    return config
