"""A small mixture of experts from nothing: the task of from_scratch.py, eight experts a layer of which a token takes two.

    python -m experiments.train --config=configs/tiny_moe.py --workdir=runs/tiny_moe

It trains on the experts that the sampler chose (routing replay) with a small load-balance loss; `moe/*` in metrics.jsonl shows what the
routers do.

Measured with that command (2 cores of an AMD EPYC with other work beside it, jax 0.10.2): 5 minutes 28 seconds in all; greedy accuracy on
512 held-out sums 42.0 % after the warm start, 88.7 % after 16 rollout steps (4 updates each, every token used once).
"""

from cispo_jax.config import default_config
from configs.common import models, recipes, tasks


def get_config():
    config = default_config()
    models.from_nothing(config, "tiny-moe", "0123456789+-=, ")
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
    config.objective.load_balance = 0.001
    config.objective.routing_replay = True
    config.optimizer.eps = 1e-8
    config.optimizer.schedule = "linear"
    config.evaluation.every = 8
    config.evaluation.num_problems = 512
    config.evaluation.batch_rows = 256
    config.checkpoint.every = 8
    return config
