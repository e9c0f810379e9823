"""Published figures of accelerators, and the devices of a topology that need not be at hand."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from cispo_jax.config import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Peak figures of one chip, per second; links in one direction, all of a chip's links together."""

    flops: float  # bfloat16
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float  # to the other chips of a slice (the published "bidirectional" figure halved)
    network_bandwidth: float  # to other slices, or other hosts
    cores: int  # TensorCores, which accelerator types of v4 and v5p count
    source: str


_DOCS = "cloud.google.com/tpu/docs/"
CHIPS = {
    "v4": Chip(275e12, 32 * GIB, 1200e9, 300e9, 6.25e9, 2, _DOCS + "v4; links: 6 x 50 GB/s, arXiv:2304.01433"),
    "v5e": Chip(197e12, 16 * GIB, 819e9, 200e9, 3.1e9, 1, _DOCS + "v5e"),
    "v5p": Chip(459e12, 95 * GIB, 2765e9, 600e9, 6.25e9, 2, _DOCS + "v5p"),
    "v6e": Chip(918e12, 32 * GIB, 1638e9, 400e9, 12.5e9, 1, _DOCS + "v6e"),
}
# NVIDIA's data sheet of H100 SXM; --hbm_gib replaces the memory.
GPU = Chip(989e12, 80 * GIB, 3350e9, 450e9, 50e9, 1, "NVIDIA H100 SXM data sheet")
# Of a laptop's core there is nothing to promise: the plan of a CPU is for its bytes.
CPU = Chip(1e11, 16 * GIB, 2e10, 1e10, 1e9, 1, "a round number")


@dataclass(frozen=True)
class Topology:
    """Devices of one kind and their chips."""

    name: str
    platform: str  # tpu | gpu | cpu
    devices: list[Any]
    count: int  # devices
    chips: int
    hosts: int
    chip: Chip
    alias: str  # accelerator type, "" where there is none

    @property
    def per_chip(self) -> int:
        """Devices of a chip: 2 on v4 as the compiler sees it."""
        return max(1, self.count // self.chips)

    @property
    def hbm_bytes(self) -> int:
        return int(self.chip.hbm_bytes / self.per_chip)


def prepare_environment() -> None:
    """What jax must find in the environment before it starts: no accelerator is looked for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks a metadata server that is not there
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several plans at a time; no device is claimed
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "2")


def find(name: str, *, slices: int = 1, hbm_gib: float = 0) -> Topology:
    """The topology called v5p:4x4x8 (v4, v5e, v5p, v6e and a shape of chips), cpu:8 or gpu:8.

    Raises:
      ConfigError: a name that is none of these, a shape that the compiler does not know, libtpu missing, memory of GPUs not given.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    if match is None or match[1] not in (*CHIPS, "cpu", "gpu"):
        raise ConfigError(
            f"--topology={name}: valid are cpu:N, gpu:N and {', '.join(CHIPS)} with a shape of chips.{_hint(name)}"
        )
    kind, count = match[1], math.prod(map(int, match[2].split("x")))
    if count < 1 or slices < 1:
        raise ConfigError(f"--topology={name} --slices={slices}: both must be at least 1.")
    if kind in ("cpu", "gpu"):
        if kind == "gpu" and hbm_gib <= 0:
            raise ConfigError(f"--topology={name} needs --hbm_gib=N, the memory of one GPU in GiB, e.g. --hbm_gib=80.")
        if slices > 1:
            raise ConfigError(f"--slices={slices}: slices are of TPUs; write {kind}:{count * slices} for more devices.")
        import jax

        # Devices of the CPU stand for all of them; for GPUs nothing is compiled.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
        chip = _with_memory(GPU if kind == "gpu" else CPU, hbm_gib)
        hosts = -(-count // 8) if kind == "gpu" else 1
        return Topology(name, kind, jax.devices()[:count], count, count, hosts, chip, "")
    devices = _tpu_devices(name, slices)
    chips = count * slices
    hosts = len({device.process_index for device in devices})
    chip = _with_memory(CHIPS[kind], hbm_gib)
    alias = f"{'v5litepod' if kind == 'v5e' else kind}-{count * chip.cores}" + (f" x {slices}" if slices > 1 else "")
    return Topology(name, "tpu", devices, len(devices), chips, hosts, chip, alias)


def _tpu_devices(name: str, slices: int) -> list[Any]:
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    # Programs for devices that are not there can be kept, but not read back.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        more = {"num_slices": slices} if slices > 1 else {}
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices)
    except Exception as error:
        text = str(error)
        if "libtpu" in text or "tpu" not in text.lower() or "register" in text:
            raise ConfigError(
                f"--topology={name}: TPU programs are compiled by libtpu, which this environment has not: make plan-env, then "
                f".venv-plan/bin/python -m experiments.plan ... ({text.splitlines()[0][:200]})"
            ) from None
        raise ConfigError(f"--topology={name}: the compiler refuses this shape: {text.splitlines()[0][:300]}") from None


def _with_memory(chip: Chip, hbm_gib: float) -> Chip:
    from dataclasses import replace

    return replace(chip, hbm_bytes=hbm_gib * GIB) if hbm_gib > 0 else chip


def _hint(name: str) -> str:
    """A sentence on accelerator types, which say how many TensorCores (v4, v5p) or chips there are, not their shape."""
    match = re.fullmatch(r"(v4|v5p|v6e|v5litepod)-(\d+)", name)
    if match is None:
        return ""
    kind = "v5e" if match[1] == "v5litepod" else match[1]
    chips = int(match[2]) // CHIPS[kind].cores
    return f" {name} is an accelerator type of {chips} chips: write their shape, as in {kind}:{shape(kind, chips)}."


def shape(kind: str, chips: int) -> str:
    """The most cubic shape of so many chips: in three dimensions on v4 and v5p, in two on v5e and v6e."""
    dimensions = 3 if kind in ("v4", "v5p") else 2
    sizes = []
    for left in range(dimensions, 0, -1):
        size = max(n for n in range(1, chips + 1) if chips % n == 0 and n**left <= chips)
        sizes.append(size)
        chips //= size
    return "x".join(map(str, sizes))
