"""Qwen3-1.7B on GSM8K with CISPO, on one node with 8 GPUs of 80 GB.

    python -m experiments.train --config=configs/qwen3_1p7b_gsm8k.py --workdir=runs/gsm8k
    python -m experiments.plan --config=configs/qwen3_1p7b_gsm8k.py --topology=gpu:8 --hbm_gib=80

`train.jsonl` and `test.jsonl` are GSM8K's own files. 64 prompts x 16 responses a step,
8 updates of 128 responses, every token used once; up to 2,048 tokens of response. Not run here (no GPU).

The plan, by arithmetic (the second command prints it): a GPU of 80 GiB needs 11.0 GiB for the train step, 6.2 for the reshard, 14.0 for
prefill and 42.0 to decode all 1,024 responses at a time; 2,104 would fit. An update computes for at least 0.6 s.
"""

from cispo_jax.config import default_config


def get_config():
    config = default_config()
    config.num_steps = 200
    config.model.preset = "qwen3-1.7b"
    config.model.weights = "hf:Qwen/Qwen3-1.7B"
    config.model.dtype = "bfloat16"
    config.data.source = "gsm8k:train.jsonl"
    config.data.eval_source = "gsm8k:test.jsonl"
    config.data.eval_size = 1_319
    config.data.max_prompt_tokens = 512
    config.data.prompt_suffix = "\nEnd your answer with a line of the form: Answer: NUMBER"
    config.sampling.prompts_per_step = 64
    config.sampling.group_size = 16
    config.sampling.max_new_tokens = 2_048
    config.objective.num_minibatches = 8
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup = 10
    config.evaluation.every = 20
    config.evaluation.num_problems = 512  # 0 = all of them
    config.evaluation.samples = 4
    config.checkpoint.every = 20
    return config
