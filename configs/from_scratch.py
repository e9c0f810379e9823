"""A 1M-parameter model from nothing: supervised warm start on written demonstrations, then CISPO, on a laptop CPU.

    python -m experiments.train --config=configs/from_scratch.py --workdir=runs/from_scratch

Half of the demonstrations guess the sum of two numbers below 100 ("47 + 38 = 85"), half work it out digit by digit ("7+8=15, 4+3+1=8, 85").
The warm start learns both and guesses badly; CISPO, which only sees whether the last number is right, learns to work it out.

Measured with that command (2 cores of an AMD EPYC, jax 0.10.2): 4 minutes 14 seconds in all, 3 of them the warm start; greedy accuracy on
512 held-out sums 45.9 % after the warm start, 86.9 % after 8 and 92.6 % after 16 rollout steps (4 updates each, every token used once).
"""

from cispo_jax.config import default_config


def get_config():
    config = default_config()
    config.num_steps = 16
    config.model.preset = "tiny"
    config.model.tokenizer = "characters:0123456789+-=, "
    config.model.remat = False
    config.data.source = "arithmetic"
    config.data.options.operations = "+"
    config.data.options.wording = "{expression}="
    config.data.options.min_value = 0
    config.data.options.max_value = 99
    config.data.options.style = "mixed"  # most demonstrations guess the sum, some work it out digit by digit
    config.data.options.plain_share = 0.5
    config.data.template = "raw"
    config.data.train_size = 4096
    config.data.eval_size = 512
    config.data.max_prompt_tokens = 16
    config.sft.num_steps = 400
    config.sft.batch_size = 64
    config.sft.learning_rate = 3e-3
    config.sampling.prompts_per_step = 32
    config.sampling.group_size = 8
    config.sampling.max_new_tokens = 24
    config.objective.num_minibatches = 4
    config.optimizer.learning_rate = 1e-4
    config.optimizer.eps = 1e-8
    config.optimizer.schedule = "linear"
    config.evaluation.every = 8
    config.evaluation.num_problems = 512
    config.evaluation.batch_rows = 256
    config.checkpoint.every = 8
    return config
