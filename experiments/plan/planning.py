"""From settings and a topology to the plan: one dict for each program, and whether all of them fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from cispo_jax import models, sharding, weights
from cispo_jax.config import Config, ConfigError, suggest
from cispo_jax.programs import MEMORY_SHARE
from experiments.plan import estimate, flops
from experiments.plan.chips import GIB, Topology
from experiments.plan.compiling import Compiled, Lowered, Sizes, bytes_of_device, compile_programs
from experiments.plan.estimate import Split

PROGRAMS = ("train_step", "reshard", "prefill", "widen", "decode")


def architecture_of(config: Config) -> models.TransformerConfig:
    """That of weights on this machine, else that of the preset: nothing is fetched from a hub."""
    if config.model.weights and not config.model.weights.startswith("hf:"):
        return weights.load_config(config.model.weights)
    if config.model.preset not in models.PRESETS:
        raise ConfigError(
            f"config.model.preset={config.model.preset!r}: valid values are {', '.join(models.PRESETS)}."
            + suggest(config.model.preset, models.PRESETS)
        )
    return models.PRESETS[config.model.preset]


def plan(
    config: Config,
    topology: Topology,
    *,
    slices: int = 1,
    programs: tuple[str, ...] = PROGRAMS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The whole plan as plain values; the contract of its keys is that of `--json` (see `__main__`)."""
    architecture = architecture_of(config)
    mesh = sharding.make_mesh(config.mesh, topology.devices)
    lowered = Lowered(config, architecture, mesh, None if topology.platform == "cpu" else topology.hbm_bytes)
    sizes, sampling_mesh = lowered.sizes, lowered.programs.sampling_mesh
    split, sampling_split = Split.of(mesh.shape), Split.of(sampling_mesh.shape)
    state, sampler = bytes_of_device(lowered.state), bytes_of_device(lowered.sampler())
    result: dict[str, Any] = {
        "topology": _describe(topology, slices),
        "mesh": dict(mesh.shape),
        "sampling_mesh": dict(sampling_mesh.shape),
        "estimate": topology.platform == "gpu",
        "sizes": dataclasses.asdict(sizes) | {"tokens_per_row": sizes.prompt + sizes.response},
        "attention": lowered.programs.kernel,
        "state_bytes": state,
        "sampler_bytes": sampler,
        "cache_bytes_of_row": estimate.cache_bytes_of_row(config, architecture, sizes, sampling_split),
    }
    # Prompts are also prefilled while others decode.
    prompts, caches = (bytes_of_device(x()) for x in (lowered.prefilled, lowered.slots)) if lowered.widths else (0, 0)
    all_flops = {
        "train_step": flops.train_step(
            architecture, rows=sizes.rows, columns=sizes.columns, targets=sizes.targets, remat=config.model.remat
        ),
        "reshard": 0,
        "prefill": flops.prefill(architecture, prompts=sizes.prompts, prompt=sizes.prompt, rows=sizes.decode_rows),
        "widen": 0,
        "decode": flops.decode_token(architecture, rows=sizes.decode_rows, columns=sizes.prompt + sizes.response),
    }  # fmt: skip
    traffic = {
        "train_step": estimate.train_traffic(
            config, architecture, sizes, split, lowered.state, lowered.programs.kernel
        ),
        "reshard": bytes_of_device(lowered.state.model) + sampler,
        "prefill": sampler,
        "widen": 2 * caches,
        "decode": estimate.decode_traffic(config, architecture, sizes, sampling_split, sampler),
    }
    # What lies in memory beside a program's own arguments.
    reference = bytes_of_device(lowered.state.model) if config.objective.kl else 0
    resident = {
        "train_step": reference,
        "reshard": state - bytes_of_device(lowered.state.model) + reference,
        "prefill": state + prompts + caches + reference,
        "widen": state + sampler + prompts + reference,
        "decode": state + prompts + reference,
    }
    figures: dict[str, Compiled | None]
    if result["estimate"]:
        figures = {name: _estimated(name, config, architecture, lowered, split, sampling_split) for name in programs}
    else:
        mesh_of = lambda name: mesh if name in ("train_step", "reshard") else sampling_mesh
        figures = compile_programs({name: getattr(lowered, name) for name in programs}, mesh_of, say)
    for name in programs:
        compiled = figures[name]
        if compiled is None:
            continue
        entry = _entry(compiled, resident[name], topology)
        entry["flops"] = all_flops[name] / mesh.size
        collectives: dict[str, float] = {}
        if compiled.program is not None:
            loop = compiled.program.token_loop if name == "decode" else None
            if name != "decode" or loop is not None:
                collectives = compiled.program.bytes_by_axis(loop)
                entry["collectives"] = compiled.program.bytes_by_kind(loop)
            entry["collective_bytes"] = collectives
            if name == "decode":
                _refuse_moved_weights(compiled, architecture, sizes, config)
        entry["roofline"] = estimate.roofline(
            topology, flops=entry["flops"], memory_bytes=traffic[name], collective_bytes=sum(collectives.values())
        )
        if name == "decode":
            entry["per"] = "token of every row"
            entry["seconds_per_token"] = max(entry["roofline"].values())
            entry["slots"] = _slots(entry, config, architecture, sizes, sampling_split, caches)
        result[name] = entry
        say(
            f"{name}: {_gib(entry['peak_bytes'])} of {entry['hbm_bytes'] / GIB:.1f} GiB, {compiled.compile_seconds:.0f} s"
        )
    result["fits"] = all(result[name]["fits"] for name in programs if name in result)
    if not result["fits"]:
        result["missing_bytes"] = max(result[name]["missing_bytes"] for name in programs if name in result)
        result["suggestion"] = next(suggestions(config, architecture, topology, lowered), None)
    return result


def _entry(compiled: Compiled, resident: int, topology: Topology) -> dict[str, Any]:
    """`fits` = the compiler accepted, and what it needs fits beside what is resident."""
    hbm = topology.hbm_bytes
    needed = compiled.needed_bytes if compiled.peak_bytes is None else compiled.peak_bytes
    assert needed is not None
    available = compiled.available_bytes or hbm
    missing = max(0, needed + resident - available)
    return {
        "argument_bytes": compiled.argument_bytes,
        "output_bytes": compiled.output_bytes,
        "temp_bytes": compiled.temp_bytes,
        "peak_bytes": compiled.peak_bytes,
        "resident_bytes": resident,
        "needed_bytes": needed + resident,
        "hbm_bytes": available,
        "missing_bytes": missing,
        "fits": compiled.peak_bytes is not None and not missing,
        "compile_seconds": round(compiled.compile_seconds, 1),
    }


def _estimated(
    name: str, config: Config, architecture, lowered: Lowered, split: Split, sampling_split: Split
) -> Compiled | None:
    """The same figures by arithmetic."""
    state, sampler, sizes = lowered.state, bytes_of_device(lowered.sampler()), lowered.sizes
    if name == "train_step":
        arguments, outputs = bytes_of_device(state) + bytes_of_device(lowered.batch()), bytes_of_device(state)
        temporary = estimate.train_temporaries(config, architecture, sizes, split, state)
        return Compiled(arguments, outputs, temporary, arguments + temporary)  # the state is donated
    if name == "reshard":
        arguments, outputs, temporary = bytes_of_device(state.model), sampler, 0
    elif name == "widen":
        if len(lowered.widths) < 2:
            return None
        arguments, outputs = (bytes_of_device(lowered.slots(width)) for width in lowered.widths[-2:])
        temporary = 0
    else:
        sizes = dataclasses.replace(sizes, response=1) if name == "prefill" else sizes
        arguments, outputs = sampler, sizes.decode_rows * lowered.sizes.response * 9 // sampling_split.rows
        temporary = estimate.decode_temporaries(config, architecture, sizes, sampling_split)
    return Compiled(arguments, outputs, temporary, arguments + outputs + temporary)


def _slots(entry: dict[str, Any], config: Config, architecture, sizes: Sizes, split: Split, caches: int) -> int:
    """Responses that can be decoded at a time: what is left beside them, in caches."""
    rows = -(-sizes.decode_rows // split.rows)
    if caches:  # arguments, and for a moment the smaller ones beside them
        return max(0, int((entry["hbm_bytes"] - entry["needed_bytes"] + caches) // (caches * 1.25 / rows))) * split.rows
    cache = rows * estimate.cache_bytes_of_row(config, architecture, sizes, split)
    beside = entry["needed_bytes"] - max(cache, (entry["temp_bytes"] or cache))
    per_row = max(cache, entry["temp_bytes"] or cache) / rows
    return max(0, int((entry["hbm_bytes"] - beside) // per_row)) * split.rows


def _refuse_moved_weights(compiled: Compiled, architecture, sizes: Sizes, config: Config) -> None:
    assert compiled.program is not None
    D, M, H = architecture.embed_dim, architecture.num_kv_heads, architecture.head_dim
    smallest = D * M * H // (compiled.program.mesh_shape["tensor"])
    moved = compiled.program.moved_weights(smallest, sizes.decode_rows)
    if moved:
        one = max(moved, key=lambda c: c.sent)
        raise ConfigError(
            f"the decode loop moves weights between devices for every token: {one.kind} of {list(one.shape)} along {one.axes} "
            f"({len(moved)} such collectives). Split sampling otherwise: config.mesh.sampling.tensor={config.mesh.sampling.tensor}, "
            f"config.mesh.sampling.expert={config.mesh.sampling.expert}."
        )


def suggestions(config: Config, architecture, topology: Topology, lowered: Lowered) -> Iterator[dict[str, Any]]:
    """Settings that would fit by arithmetic, nearest first: fewer rows at a time, then more devices for heads."""
    rows, devices = lowered.sizes.rows, topology.count
    G, P = config.sampling.group_size, config.sampling.prompts_per_step
    expert = lowered.programs.mesh.shape["expert"]
    for tensor in (n for n in (1, 2, 4, 8, 16) if devices % (n * expert) == 0):
        if any(size % tensor for size in (architecture.num_heads, architecture.num_kv_heads, architecture.mlp_dim)):
            continue
        split = Split(devices // tensor, tensor, expert)
        if rows % split.rows:
            continue
        for micro in sorted((m for m in range(split.rows, rows + 1, split.rows) if rows % m == 0), reverse=True):
            sizes = dataclasses.replace(lowered.sizes, micro_rows=micro)
            state = bytes_of_device(lowered.state)
            train = state + estimate.train_temporaries(config, architecture, sizes, split, lowered.state)
            if train > topology.hbm_bytes:
                continue
            for sampling_tensor in (
                n for n in (1, 2, 4, 8) if devices % (n * expert) == 0 and architecture.num_kv_heads % n == 0
            ):
                sampling = Split(devices // sampling_tensor, sampling_tensor, expert)
                weights_bytes = (
                    models.count_parameters(architecture).total * estimate.width(config) / sampling_tensor / expert
                )
                free = topology.hbm_bytes - state - weights_bytes
                slots = estimate.slots(MEMORY_SHARE * free, config, architecture, lowered.sizes, sampling)
                if slots:
                    yield {
                        "config.mesh.tensor": tensor,
                        "config.mesh.expert": expert,
                        "config.mesh.fsdp": -1,
                        "config.objective.micro_batch_tokens": micro // split.rows * lowered.sizes.columns,
                        "config.mesh.sampling.tensor": sampling_tensor,
                        "config.sampling.slots": slots if slots < P * G else 0,
                    }


def _describe(topology: Topology, slices: int) -> dict[str, Any]:
    return {
        "name": topology.name, "slices": slices, "devices": topology.count, "chips": topology.chips, "hosts": topology.hosts,
        "accelerator_type": topology.alias, "hbm_bytes": topology.hbm_bytes, "peak_flops": topology.chip.flops / topology.per_chip,
        "hbm_bandwidth": topology.chip.hbm_bandwidth / topology.per_chip,
        "link_bandwidth": topology.chip.link_bandwidth / topology.per_chip, "source": topology.chip.source,
    }  # fmt: skip


def _gib(value: int | None) -> str:
    return "does not fit" if value is None else f"{value / GIB:.1f}"
