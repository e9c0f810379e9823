"""MiniMax-M1, 456B parameters of which a token meets 46B, with its own settings at 40K tokens, for 512 chips of TPU v5p.

    python -m experiments.train --config=configs/minimax_m1.py --workdir=runs/minimax_m1 --config.data.source=problems.jsonl
    .venv-plan/bin/python -m experiments.plan --config=configs/minimax_m1.py --topology=v5p:8x8x8

From the paper (arXiv:2506.13585): AdamW 0.9, 0.95, 1e-15, float32 head, no lower bound, no KL, 16 updates a batch, every token used once,
dynamic sampling and DAPO's penalty of long responses, responses up to 40K (its first stage; 512 H800). It gives no upper bound, rate,
batch or group: the bound is ScaleRL's 1 + 4, the others are DAPO's. Not run here (512 chips).

The plan as that command printed it (libtpu 0.0.50.1, jax 0.12.0.1; 8 minutes on 2 cores of an AMD EPYC, other work beside it), GiB of the
95 of a chip: train step 75.8, with 512 rows of 40,960 tokens at a time and softmax attention by Splash; reshard 27.9; with 8,192
responses at a time, 16 a chip, prefill 51.1, decode 66.9 and 60.7 while their caches grow; 12,800 would fit. An update computes for at
least 36 s; the links are busy for 16 s at most, were every exchange of tokens as full as its buffer. The paper's 80K does not fit: a
row's saved activations, 36 GiB here, would double, by which at least 16 GiB are missing, and no axis of the mesh splits a row.
"""

from cispo_jax.config import default_config


def get_config():
    config = default_config()
    config.num_steps = 100
    config.model.preset = "minimax-m1"
    config.model.weights = "hf:MiniMaxAI/MiniMax-M1-40k"
    config.model.dtype = "bfloat16"
    config.data.source = "problems.jsonl"
    config.data.max_prompt_tokens = 2_048
    config.data.long_prompts = "filter"
    config.rewards.overlong_buffer = 4_096
    config.sampling.prompts_per_step = 512
    config.sampling.group_size = 16
    config.sampling.max_new_tokens = 38_912  # 40,960 with the prompt
    config.sampling.max_refills = 2
    config.objective.epsilon_high = 4.0
    config.objective.num_minibatches = 16  # of 512 rows
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup = 20
    config.mesh.expert = 32  # x fsdp 16
    config.mesh.sampling.tensor = 8
    config.evaluation.every = 4
    config.evaluation.samples = 32
    config.evaluation.top_p = 0.95
    config.checkpoint.every = 4
    return config
