"""The comparison of MiniMax-M1's figure 2 in one page: Qwen2.5-32B on DAPO-Math with CISPO, DAPO or GRPO, for a TPU v5p-256.

    python -m experiments.train --config=configs/qwen2p5_32b_dapo_math.py --workdir=runs/dapo_math
    .venv-plan/bin/python -m experiments.plan --config=configs/qwen2p5_32b_dapo_math.py --topology=v5p:4x4x8

`configs/qwen2p5_32b_dapo_math.py:dapo` and `:grpo` are the other two; they share everything but the objective. The two files are those of
DAPO-Math-17k and AIME-2024 as DAPO's authors publish them. As in DAPO: 512 prompts x 16 responses a step, every token used once in
16 updates, 2,048 tokens of prompt and 20,480 of response, AdamW 1e-6 after 20 steps of warm-up, no KL. What the paper leaves open is
taken from ScaleRL: CISPO's cap is 1 + 4. Not run here (128 chips).

The plan as that command printed it (libtpu 0.0.50.1, jax 0.12.0.1; 2 to 4 minutes on 2 cores of an AMD EPYC), GiB of the 95 of a chip:
train step 45.5, with attention by Splash; reshard 26.3; with 1,024 responses at a time prefill 63.9, decode 64.1 and 77.9 while their
caches grow; 1,392 would fit. An update whose responses are all as long as the limit computes for at least 62 s; its links are busy for
1.3 s (779 GB leave a chip).
"""

from cispo_jax.config import default_config

OBJECTIVES = {"cispo": (None, 4.0), "dapo": (0.2, 0.28), "grpo": (0.2, 0.2)}


def get_config(objective="cispo"):
    config = default_config()
    config.num_steps = 92  # 1,472 updates, where the figure ends
    config.model.preset = "qwen2.5-32b"
    config.model.weights = "hf:Qwen/Qwen2.5-32B"
    config.model.dtype = "bfloat16"
    config.data.source = "dapo_math:dapo-math-17k.parquet"
    config.data.max_prompt_tokens = 2_048
    config.data.long_prompts = "filter"
    config.data.prompt_suffix = "\n\nSolve the problem step by step. The last line of your answer is: Answer: $Answer"
    config.rewards.overlong_buffer = 4_096
    config.sampling.prompts_per_step = 512
    config.sampling.group_size = 16
    config.sampling.max_new_tokens = 20_480
    config.sampling.max_refills = 2
    config.sampling.slots = 1_024  # their caches share the memory
    config.objective.name = objective
    config.objective.epsilon_low, config.objective.epsilon_high = OBJECTIVES[objective]
    config.objective.num_minibatches = 16
    config.optimizer.learning_rate = 1e-6
    config.optimizer.eps = 1e-8  # not M1's 1e-15: Qwen2.5 has key biases, whose true gradient is zero
    config.optimizer.warmup = 20
    config.mesh.data = 4  # x fsdp 32: 5,120 / 32 is a multiple of 32, so that no shard is padded
    config.mesh.sampling.tensor = 8
    config.evaluation.every = 4
    config.evaluation.num_problems = 64
    config.evaluation.sets.aime_2024 = {
        "source": "aime_2024:aime-2024.parquet",
        "samples": 32,
        "top_p": 0.95,
    }  # DAPO's own: 0.7
    config.checkpoint.every = 4
    return config
