"""Seconds on a laptop CPU: random weights, sums of one digit, four rollout steps. For tests and for trying a change.

python -m experiments.train --config=configs/debug.py --workdir=runs/debug
"""

from cispo_jax.config import default_config


def get_config():
    config = default_config()
    config.num_steps = 4
    config.model.preset = "debug"
    config.model.tokenizer = "characters:0123456789+-= "
    config.model.remat = False
    config.data.source = "arithmetic"
    config.data.template = "raw"
    config.data.options.wording = "{expression}="
    config.data.options.min_value = 0
    config.data.options.max_value = 9
    config.data.train_size = 64
    config.data.eval_size = 16
    config.data.max_prompt_tokens = 8
    config.sampling.prompts_per_step = 8
    config.sampling.group_size = 8
    config.sampling.max_new_tokens = 6
    config.objective.num_minibatches = 4
    config.optimizer.learning_rate = 1e-3
    config.evaluation.every = 2
    config.evaluation.num_problems = 16
    config.evaluation.samples = 2
    config.checkpoint.every = 1
    return config
