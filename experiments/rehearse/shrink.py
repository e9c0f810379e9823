"""What a rehearsal makes smaller: widths, depth, lengths and counts, nothing else. Pure functions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from cispo_jax.config import Config, MeshSettings, SamplingMeshSettings, from_config_dict, to_dict
from cispo_jax.models import TransformerConfig
from cispo_jax.programs import SHORT

DEVICES = 8
STEPS = 4  # rollout steps: it is stopped after the first or second and goes on
TOKENS = 16  # of a response
PROBLEMS = 64  # of training; a quarter of that is held out
REWARD = "experiments.rehearse.rewards:varied"


def shrink(config: Config, *, demonstration: int = 0) -> Config:
    """The settings of the rehearsal. `demonstration`: tokens of the longest one of a warm start, which a response must hold."""
    sampling, objective, evaluation = config.sampling, config.objective, config.evaluation
    # Mini-batches, groups in one: what was several stays several; of several groups come several passes.
    minibatches = min(objective.num_minibatches, 2)
    groups = sampling.prompts_per_step // objective.num_minibatches
    passes = min(groups, 2)
    largest = sampling.group_size if groups == 1 else min(sampling.group_size, 4)
    group_size = max(n for n in range(2, largest + 1) if DEVICES * passes % n == 0)
    # A pass gives each device a row: a part of a group, or a whole one where there are several passes.
    prompts = minibatches * DEVICES * passes // (group_size if passes == 1 else 1)
    # Fewer slots than responses where that is so, or may be so on devices that say how much memory they have.
    slots = DEVICES if sampling.slots or sampling.max_new_tokens >= SHORT else 0
    response = min(sampling.max_new_tokens, max(TOKENS, demonstration))
    epochs = min(objective.num_epochs, 2)
    by_steps = config.optimizer.warmup_unit == "rollout_steps"
    before = config.num_steps * (1 if by_steps else objective.num_minibatches * objective.num_epochs)
    after = STEPS * (1 if by_steps else minibatches * epochs)
    rewards = config.rewards
    smaller = dataclasses.replace(
        config,
        num_steps=STEPS,
        mesh=reduce_mesh(config.mesh),
        data=dataclasses.replace(
            config.data,
            train_size=min(config.data.train_size, PROBLEMS),  # has no effect on a file
            eval_size=min(config.data.eval_size, PROBLEMS // 4),
        ),
        rewards=dataclasses.replace(
            rewards,
            functions={**rewards.functions, "rehearsal": REWARD},
            task="on" if rewards.task == "auto" and not rewards.functions else rewards.task,
            workers=min(rewards.workers, 2),
            overlong_buffer=_share(rewards.overlong_buffer, response, sampling.max_new_tokens),
        ),
        sampling=dataclasses.replace(
            sampling,
            prompts_per_step=prompts,
            group_size=group_size,
            max_new_tokens=response,
            slots=slots,
            sync_tokens=min(sampling.sync_tokens, TOKENS // 4),
        ),
        objective=dataclasses.replace(
            objective,
            num_minibatches=minibatches,
            num_epochs=epochs,
            micro_batch_tokens=min(objective.micro_batch_tokens, 1),
        ),
        optimizer=dataclasses.replace(config.optimizer, warmup=_share(config.optimizer.warmup, after, before)),
        sft=dataclasses.replace(
            config.sft,
            num_steps=min(config.sft.num_steps, STEPS),
            batch_size=min(config.sft.batch_size, DEVICES if config.sft.num_steps else config.sft.batch_size),
        ),
        evaluation=dataclasses.replace(
            evaluation,
            every=min(evaluation.every, 2),
            num_problems=min(evaluation.num_problems or DEVICES, DEVICES),
            samples=min(evaluation.samples, 2),
            sets={name: _small_set(table) for name, table in evaluation.sets.items()},
            batch_rows=min(evaluation.batch_rows, DEVICES),
        ),
        checkpoint=dataclasses.replace(config.checkpoint, every=min(config.checkpoint.every, 2)),
        logging=dataclasses.replace(config.logging, wandb=""),
        profile=dataclasses.replace(config.profile, steps="2:3" if config.profile.steps else ""),
    )
    return from_config_dict(smaller)


def _share(value: int, after: int, before: int) -> int:
    """`value` of `before` as a part of `after`, at least 1 where it is not 0."""
    return max(1, round(value * after / max(before, 1))) if value and after < before else value


def reduce_mesh(mesh: MeshSettings) -> MeshSettings:
    """`DEVICES` devices; an axis that was split stays split, in two where there are others (of four axes `data` is given up)."""
    split = [axis for axis in ("expert", "tensor", "fsdp", "data") if getattr(mesh, axis) != 1][:3]
    sizes = {axis: 2 if axis in split else 1 for axis in ("data", "fsdp", "expert", "tensor")}
    # Heads and experts of a small model are few: what is left goes to an axis that splits the batch.
    sizes["data" if "data" in split and "fsdp" not in split else "fsdp"] *= DEVICES // 2 ** len(split)
    sampling = SamplingMeshSettings(expert=min(mesh.sampling.expert, 2), tensor=min(mesh.sampling.tensor, 2))
    return MeshSettings(**sizes, sampling=sampling)


def other_mesh(mesh: MeshSettings) -> MeshSettings:
    """The same devices with another split over `data` and `fsdp`, for the restart."""
    both = mesh.data * mesh.fsdp
    sizes = [(n, both // n) for n in range(1, both + 1) if both % n == 0 and n != mesh.data]
    data, fsdp = max(sizes, key=min)  # both split, where that is possible
    return dataclasses.replace(mesh, data=data, fsdp=fsdp)


def fewest_devices(mesh: MeshSettings) -> int:
    """Devices that the sizes of a mesh ask for, -1 taken as small as it may be."""
    sizes = [mesh.data, mesh.fsdp, mesh.expert, mesh.tensor]
    fixed = math.prod(size for size in sizes if size > 0)
    if -1 not in sizes:
        return fixed
    return math.lcm(
        fixed, math.prod(max(1, getattr(mesh.sampling, a) or getattr(mesh, a)) for a in ("expert", "tensor"))
    )


def shrink_architecture(full: TransformerConfig) -> TransformerConfig:
    """Narrow and two periods deep; kinds of layers and their order, queries a key head, experts a token and the rest stay.

    Every layer of a period is compiled, so runs of one kind in it are cut to two: 7 lightning + 1 softmax to 2 + 1.
    """
    kv_heads = min(full.num_kv_heads, 2)
    head_dim = min(full.head_dim, 8)
    rotary_dim = full.rotary_dim and max(2, full.rotary_dim * head_dim // full.head_dim // 2 * 2)
    narrow = {"embed_dim": 32, "mlp_dim": 64, "expert_dim": 64 if full.expert_dim == full.mlp_dim else 32}
    attention, mlp = _cut_runs(full.attention), _cut_runs(full.mlp)
    period = math.lcm(len(attention), len(mlp))
    return dataclasses.replace(
        full,
        attention=attention,
        mlp=mlp,
        **{name: min(getattr(full, name), width) for name, width in narrow.items()},
        shared_expert_dim=min(full.shared_expert_dim, 32),
        num_layers=period * min(2, full.num_layers // period),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * (full.num_heads // full.num_kv_heads),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        num_experts=min(full.num_experts, 2 * full.experts_per_token),
    )


def _cut_runs(kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(kind for _, run in itertools.groupby(kinds) for kind in list(run)[:2])


def changes(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Settings (or fields of an architecture) that differ, by name: (from, to); None = not there."""
    one, other = (_flat(to_dict(x) if isinstance(x, Config) else vars(x)) for x in (before, after))
    return {name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _small_set(table: Any) -> Any:
    """A benchmark of `config.evaluation.sets`; what is wrong in it fails as it would at full size."""
    if not isinstance(table, Mapping):
        return table
    few = {"num_problems": min(table.get("num_problems") or DEVICES, DEVICES)}
    return dict(table) | few | ({"samples": min(table["samples"], 2)} if "samples" in table else {})
