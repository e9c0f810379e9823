"""Batches, updates and rates of the pages: each function sets `config.sampling`, `config.objective` and `config.optimizer`.

`grpo`, `dapo`, `cispo_m1` and `cispo_scalerl` are published recipes: after a model and a data set, one line. What a run makes of them is
printed when it starts. `epochs=16` passes 16 times over the whole batch in place of 16 mini-batches once each (both are read into
MiniMax-M1's "16 rounds of off-policy updates"); prompts, responses and lengths are arguments, so that they fit a laptop too.
"""


def sixteen_updates(config):
    """128 responses a step and 16 updates, one for each prompt's group: every token is used once (DAPO's reading of "16 rounds")."""
    config.sampling.prompts_per_step = 16
    config.sampling.group_size = 8
    config.objective.num_minibatches = 16
    config.optimizer.learning_rate = 5e-6


def four_updates(config, *, prompts_per_step, learning_rate):
    """Groups of 8 and 4 updates a step, every token used once."""
    config.sampling.prompts_per_step = prompts_per_step
    config.sampling.group_size = 8
    config.objective.num_minibatches = 4
    config.optimizer.learning_rate = learning_rate


def grpo(config, *, prompts=16, group_size=64, kl=0.04, learning_rate=1e-6, minibatches=1, epochs=1):
    """GRPO as DeepSeekMath trains with it (arXiv 2402.03300, section 4.2): groups of 64 responses, 1,024 in a batch, one update, 1e-6,
    KL 0.04 (k3) to the starting weights, token-mean of each response; clipping 0.2. `kl=0` leaves the reference policy out."""
    _batch(config, prompts, group_size, minibatches, epochs)
    config.sampling.dynamic = False
    config.objective.name = "grpo"
    config.objective.kl = kl
    config.optimizer.learning_rate = learning_rate
    config.optimizer.b2 = 0.999  # AdamW's own defaults, which the paper does not change
    config.optimizer.eps = 1e-8


def dapo(config, *, prompts=512, group_size=16, learning_rate=1e-6, minibatches=16, epochs=1, warmup=20, overlong=0.2):
    """DAPO (arXiv 2503.14476, section 4.1; weight decay and gradient norm from verl's recipe): clip 0.2 / 0.28, token-mean over the batch,
    dynamic sampling with up to 10 batches, 512 x 16 responses in 16 updates, 1e-6 after 20 rollout steps of warm-up, no KL.

    `overlong`: the soft penalty's share of max_new_tokens (4,096 of 20,480). Its weight is 0.5: the paper's rewards are 1 and -1, ours 1
    and 0.
    """
    _batch(config, prompts, group_size, minibatches, epochs)
    config.sampling.max_refills = 9
    config.objective.name = "dapo"
    config.rewards.overlong_buffer = int(overlong * config.sampling.max_new_tokens)
    config.rewards.overlong_penalty = 0.5
    config.optimizer.learning_rate = learning_rate
    config.optimizer.warmup = warmup
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.1


def cispo_m1(
    config, *, prompts=512, group_size=16, learning_rate=1e-6, minibatches=16, epochs=1, warmup=20, overlong=0.2
):
    """CISPO as MiniMax-M1 trains with it (arXiv 2506.13585): Eq. 4 with no lower bound and no KL, prompt-mean of token-means, AdamW
    (0.9, 0.95, 1e-15), 16 updates a batch, dynamic sampling and length penalty from DAPO, repetition stop after 3,000 tokens.

    Not published, and where it comes from here: the upper epsilon (4, in the flat range of ScaleRL, arXiv 2510.13786, section 3.2); batch,
    learning rate, warm-up and the penalty's width (DAPO, whose data and steps the paper's comparison shares). Of models with parameters
    whose true gradient is zero (the key biases of Qwen2.5), set `config.optimizer.eps = 1e-8` after this.
    """
    _batch(config, prompts, group_size, minibatches, epochs)
    config.sampling.max_refills = 9
    config.sampling.repetition_stop = 3_000
    config.objective.name = "cispo"
    config.objective.epsilon_high = 4.0
    config.objective.aggregation = "prompt"
    config.rewards.overlong_buffer = int(overlong * config.sampling.max_new_tokens)
    config.rewards.overlong_penalty = 0.5
    config.optimizer.learning_rate = learning_rate
    config.optimizer.warmup = warmup
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-15


def cispo_scalerl(config, *, prompts=48, group_size=16, learning_rate=5e-7, minibatches=1, epochs=1, warmup=100):
    """CISPO in ScaleRL (arXiv 2510.13786, section 3): the ratio to the sampler's own log-probs, weight capped at 5, prompt-mean, advantages
    scaled by the batch, groups without variance dropped and not replaced, prompts retired at a pass rate of 0.9; 48 x 16 responses an
    update, AdamW 5e-7 after 100 steps of warm-up, weight decay 0.01. Not here: its asynchronous pipeline, its length control by
    interruption.
    """
    _batch(config, prompts, group_size, minibatches, epochs)
    config.sampling.max_refills = 0
    config.data.retire_at = 0.9
    config.objective.name = "cispo"
    config.objective.epsilon_high = 4.0
    config.objective.anchor = "rollout"
    config.objective.aggregation = "prompt"
    config.objective.advantage_scale = "batch"
    config.optimizer.learning_rate = learning_rate
    config.optimizer.warmup = warmup
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-15
    config.optimizer.weight_decay = 0.01


RECIPES = {"grpo": grpo, "dapo": dapo, "cispo_m1": cispo_m1, "cispo_scalerl": cispo_scalerl}


def _batch(config, prompts, group_size, minibatches, epochs):
    config.sampling.prompts_per_step = prompts
    config.sampling.group_size = group_size
    config.objective.num_minibatches = minibatches
    config.objective.num_epochs = epochs
