"""Bytes and times by arithmetic: what no compiler is asked for. Bytes of arrays are exact, those of temporaries a rule of thumb."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cispo_jax import models
from cispo_jax.config import Config
from cispo_jax.models.attention import BLOCK
from cispo_jax.programs import chunk_tokens
from cispo_jax.sharding import BATCH
from experiments.plan import flops
from experiments.plan.chips import Topology
from experiments.plan.compiling import Sizes, bytes_of_device


@dataclass(frozen=True)
class Split:
    """How many ways a mesh splits rows, and the devices that hold one copy of the layers between them while it computes."""

    rows: int
    tensor: int
    expert: int

    @staticmethod
    def of(shape) -> Split:
        rows = 1
        for axis in BATCH:
            rows *= shape[axis]
        return Split(rows, shape["tensor"], shape["expert"])


def width(config: Config) -> int:
    return jnp.dtype(config.model.dtype).itemsize


def largest_layer(architecture: models.TransformerConfig, split: Split) -> float:
    """Parameters of the largest layer that a device holds whole while it computes it."""
    abstract = jax.eval_shape(lambda: models.Transformer(architecture, key=jax.random.key(0)))
    totals = []
    for block in abstract.layers:
        depth = block.attention_norm.shape[0]
        total = 0.0
        for path, leaf in jax.tree_util.tree_leaves_with_path(block):
            expert = isinstance(block.mlp, models.transformer.MoeMlp) and leaf.ndim == 4 and "mlp" in str(path)
            total += leaf.size / depth / split.tensor / (split.expert if expert else 1)
        totals.append(total)
    return max(totals)


def train_temporaries(config: Config, architecture: models.TransformerConfig, sizes: Sizes, split: Split, state) -> int:
    """Gradients, saved activations, one layer's work, the head."""
    w, parameters = width(config), bytes_of_device(state.model)
    rows = sizes.micro_rows / split.rows
    tokens = rows * sizes.columns
    D, V = architecture.embed_dim, architecture.vocab_size / split.tensor
    gradients = parameters * (2 if sizes.micro_rows < sizes.rows else 1)
    layer_work = tokens * w * layer_width(architecture, split)
    saved = tokens * D * w if config.model.remat == "full" else layer_work
    weights = 3 * largest_layer(architecture, split) * w if split.rows > 1 else 0
    head = 3 * D * V * 4 + 3 * chunk_tokens(architecture.vocab_size) * V * 4 + rows * sizes.targets * D * 3 * w
    scores = 3 * rows * (architecture.num_heads / split.tensor) * min(BLOCK * BLOCK, sizes.columns**2) * 4
    return int(gradients + architecture.num_layers * saved + 2 * layer_work + weights + head + scores)


def layer_width(architecture: models.TransformerConfig, split: Split) -> float:
    """Numbers that one layer holds of a token between its matrix products."""
    N, M, H = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim
    dense = max(
        architecture.mlp_dim if "dense" in architecture.mlp else 0,
        architecture.experts_per_token * architecture.expert_dim,
    )
    return 4 * architecture.embed_dim + (2 * (N + M) * H + 3 * dense) / split.tensor


def cache_bytes_of_row(config: Config, architecture: models.TransformerConfig, sizes: Sizes, split: Split) -> int:
    """Of one response, on a device that holds its share of the heads."""
    heads = architecture.num_kv_heads / min(split.tensor, architecture.num_kv_heads)
    total = 0.0
    for i in range(architecture.num_layers):
        if architecture.kinds(i)[0] == "softmax":
            total += 2 * (sizes.prompt + sizes.response) * heads * architecture.head_dim * width(config)
        else:
            total += architecture.num_heads / split.tensor * architecture.head_dim**2 * 4
    return int(total)


def decode_temporaries(config: Config, architecture: models.TransformerConfig, sizes: Sizes, split: Split) -> int:
    rows = -(-sizes.decode_rows // split.rows)
    prompts = max(1, sizes.prompts / split.rows)
    cache = rows * cache_bytes_of_row(config, architecture, sizes, split)
    logits = 4 * rows * architecture.vocab_size / split.tensor * 4
    prefill = 2 * prompts * sizes.prompt * layer_width(architecture, split) * width(config)
    return int(cache + logits + prefill)


def slots(free_bytes: float, config: Config, architecture, sizes: Sizes, split: Split) -> int:
    """Responses whose caches fit `free_bytes` of each device, over all devices."""
    return max(0, int(free_bytes // cache_bytes_of_row(config, architecture, sizes, split))) * split.rows


# ---- times: the least that the chip's peaks allow; nothing overlaps perfectly and no kernel reaches a peak


def roofline(topology: Topology, *, flops: float, memory_bytes: float, collective_bytes: float) -> dict[str, float]:
    """Seconds on one device for its operations, its memory traffic and its links."""
    chip, per_chip = topology.chip, topology.per_chip
    return {
        "compute_seconds": flops / (chip.flops / per_chip),
        "memory_seconds": memory_bytes / (chip.hbm_bandwidth / per_chip),
        "interconnect_seconds": collective_bytes / (chip.link_bandwidth / per_chip),
    }


def train_traffic(config: Config, architecture, sizes: Sizes, split: Split, state, kernel: str) -> float:
    """Bytes through a device's memory in one update: weights of each pass, saved activations, scores of attention, the optimizer."""
    w, parameters = width(config), bytes_of_device(state.model)
    passes = sizes.rows // sizes.micro_rows
    held = models.count_parameters(architecture).total / split.tensor / split.expert * w
    rows = sizes.rows / split.rows
    tokens = rows * sizes.columns
    forward = 2 if config.model.remat == "full" else 1
    activations = (forward + 2) * architecture.num_layers * tokens * layer_width(architecture, split) * w * 2
    softmax = sum(architecture.kinds(i)[0] == "softmax" for i in range(architecture.num_layers))
    pairs = flops.scores(sizes.columns)
    # Written and read, as float32 and in the compute dtype, in each pass; other kernels keep them to themselves.
    scores = (
        (kernel == "blocks")
        * (forward + 2)
        * softmax
        * rows
        * pairs
        * architecture.num_heads
        / split.tensor
        * 2
        * (4 + w)
    )
    return (forward + 1) * passes * held + activations + scores + 8 * parameters


def decode_traffic(config: Config, architecture, sizes: Sizes, split: Split, sampler_bytes: float) -> float:
    """Bytes through a device's memory for one token of every row: its weights and its rows' whole caches."""
    rows = -(-sizes.decode_rows // split.rows)
    return sampler_bytes + rows * cache_bytes_of_row(config, architecture, sizes, split)
