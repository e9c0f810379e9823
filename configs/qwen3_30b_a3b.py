"""Qwen3-30B-A3B, 128 experts a layer of which a token takes 8, on DAPO-Math with CISPO, for a TPU v5p-256.

    python -m experiments.train --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3_30b_a3b
    .venv-plan/bin/python -m experiments.plan --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x8

Data, batches and rates are those of qwen2p5_32b_dapo_math.py. It trains on the experts that the sampler chose (routing replay). The
load-balance loss stays off: at a rate of 1e-6 the routers hardly move, no token is ever dropped, and over micro-batches it would cost one
more forward pass; `moe/*` in metrics.jsonl shows whether the balance drifts. Not run here (128 chips).

The plan as that command printed it (libtpu 0.0.50.1, jax 0.12.0.1; 8.5 minutes on 2 cores of an AMD EPYC, other work beside it), GiB of
the 95 of a chip: train step 14.6, with attention by Splash; reshard 8.3; with 1,024 responses at a time prefill 22.9, decode 26.5 and
28.8 while their caches grow; 4,096 would fit. A token of all of them takes at least 7.5 ms. In an update the links are busy for 13 s at
most, were every exchange of tokens as full as its buffer, beside at least 12 s of computing.
"""

from configs import qwen2p5_32b_dapo_math


def get_config():
    config = qwen2p5_32b_dapo_math.get_config("cispo")
    config.model.preset = "qwen3-30b-a3b"
    config.model.weights = "hf:Qwen/Qwen3-30B-A3B-Base"
    config.objective.routing_replay = True
    config.optimizer.eps = 1e-15  # no key biases
    config.mesh.data = 1
    config.mesh.expert = 8
    config.mesh.sampling.tensor = 4
    return config
