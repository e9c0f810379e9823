"""SmolLM2-135M-Instruct learns to work sums of three numbers out one line at a time (reasoning-gym `basic_arithmetic`).

    pip install '.[rewards]'
    python -m experiments.train --config=configs/smollm2_reasoning.py --workdir=runs/smollm2_reasoning

The prompt shows two worked examples; an answer is two lines of arithmetic and a last line "Answer: ...". Measured with that command, seed 0
(2 cores of an AMD EPYC, float32, jax 0.10.2): 6.5 minutes, 2.3 of them the three evaluations. On 128 held-out
problems, whose text never occurs in training (the same numbers in another order may):

                          greedy accuracy    avg@4 (temperature 1)
    start                      47.7 %              26.8 %
    after  6 rollout steps     93.0 %              89.1 %
    after 12 rollout steps     93.0 %              92.8 %

The mean reward of the sampled batch is 0.16, 0.34 and 0.71 in steps 1 to 3; from step 9 on few groups still differ in their rewards.
The start often adds three numbers at once ("4 + 1 + 7 = 18") and ends in a wrong number; what is learned is to add two at a time. Tried
before: sums and differences with one example start at 16 % greedy, 10 % sampled, and the reward had hardly moved after 4 steps; sums of
four numbers start at 20 %; tasks of reasoning-gym without examples in the prompt start near 0 %, where groups have no signal.
"""

from cispo_jax.config import default_config
from configs.common import models, recipes, tasks


def get_config():
    config = default_config()
    models.smollm2_135m(config)
    tasks.worked_sums(config, terms=3)
    recipes.sixteen_updates(config)
    config.num_steps = 12
    config.data.train_size = 1000
    config.data.eval_size = 256
    config.sampling.max_new_tokens = 32
    config.evaluation.every = 6
    config.evaluation.num_problems = 128
    config.evaluation.samples = 4
    config.checkpoint.every = 6
    config.checkpoint.keep = 1
    return config
