"""SmolLM2-135M-Instruct learns to work sums of three numbers out one line at a time (reasoning-gym `basic_arithmetic`).

    pip install '.[rewards]'
    python -m experiments.train --config=configs/smollm2_reasoning.py --workdir=runs/smollm2_reasoning

The prompt shows one worked example; an answer is two lines of arithmetic and a last line "Answer: ...". Measured so far (2 cores of an AMD
EPYC): greedy accuracy of the starting model on 128 held-out problems 16.4 %. The result of a whole run has not been recorded yet; steps and
learning rate are taken from `quickstart.py` and not tuned here.
"""

from cispo_jax.config import default_config
from configs.common import models, recipes, tasks


def get_config():
    config = default_config()
    models.smollm2_135m(config)
    tasks.worked_sums(config, terms=3)
    recipes.sixteen_updates(config)
    config.num_steps = 10
    config.data.train_size = 2000
    config.data.eval_size = 256
    config.sampling.max_new_tokens = 32
    config.evaluation.every = 0
    config.evaluation.num_problems = 128
    config.evaluation.samples = 4
    config.checkpoint.every = 5
    config.checkpoint.keep = 1
    return config
