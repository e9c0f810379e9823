"""SmolLM2-135M-Instruct learns sums and differences of two numbers from 2 to 20 with CISPO, on a laptop CPU (`make demo`).

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart --config.seed=0

Measured with that command (2 cores of an AMD EPYC, float32, jax 0.10.2): 8 rollout steps of 16 prompts x 8 responses and up to 16
updates each (a mini-batch without a signal takes none), about 2 minutes with both evaluations. Greedy accuracy on 256 held-out problems,
whose pairs of operands never occur in training:

    seed 0   12.5 % -> 61.7 %
    seed 1   12.5 % -> 75.8 %
    seed 2   12.5 % -> 77.0 %
    control  12.5 % ->  6.6 %   (seed 0 with --config.sampling.shuffle_rewards=True: rewards permuted within the batch)

The limit is 16 tokens: the start talks around the question and is mostly cut off before a result, so a part of the gain is to answer at
once; the rest are right results in place of wrong ones (the table at the end of the run tells them apart).
"""

from cispo_jax.config import default_config
from configs.common import models, recipes, tasks


def get_config():
    config = default_config()
    models.smollm2_135m(config)
    tasks.sums(config, min_value=2, max_value=20)
    recipes.sixteen_updates(config)
    config.num_steps = 8
    config.data.train_size = 2048
    config.data.eval_size = 256
    config.sampling.max_new_tokens = 16
    config.evaluation.every = 0
    config.checkpoint.every = 4
    config.checkpoint.keep = 1
    return config
