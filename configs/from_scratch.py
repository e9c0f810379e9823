"""A 1M-parameter model from nothing: supervised warm start on written demonstrations, then CISPO, on a laptop CPU.

    python -m experiments.train --config=configs/from_scratch.py --workdir=runs/from_scratch

Half of the demonstrations guess the sum of two numbers below 100 ("47 + 38 = 85"), half work it out digit by digit ("7+8=15, 4+3+1=8, 85").
The warm start learns both and guesses badly; CISPO, which only sees whether the last number is right, learns to work it out.

Measured with that command (2 cores of an AMD EPYC, jax 0.10.2): 4 minutes 14 seconds in all, 3 of them the warm start; greedy accuracy on
512 held-out sums 45.9 % after the warm start, 86.9 % after 8 and 92.6 % after 16 rollout steps (4 updates each, every token used once).
"""

from cispo_jax.config import default_config
from configs.common import models, recipes, tasks


def get_config():
    config = default_config()
    models.from_nothing(config, "tiny", "0123456789+-=, ")
    tasks.sums(config, min_value=0, max_value=99, operations="+", wording="{expression}=")
    recipes.four_updates(config, prompts_per_step=32, learning_rate=1e-4)
    config.num_steps = 16
    config.data.options.style = "mixed"  # half of the demonstrations guess the sum, half work it out digit by digit
    config.data.options.plain_share = 0.5
    config.data.train_size = 4096
    config.data.eval_size = 512
    config.data.max_prompt_tokens = 16
    config.sft.num_steps = 400
    config.sft.batch_size = 64
    config.sft.learning_rate = 3e-3
    config.sampling.max_new_tokens = 24
    config.optimizer.eps = 1e-8
    config.optimizer.schedule = "linear"
    config.evaluation.every = 8
    config.evaluation.num_problems = 512
    config.evaluation.batch_rows = 256
    config.checkpoint.every = 8
    return config
