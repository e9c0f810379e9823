"""The mesh, the table of logical axis rules, and one sharding tree for parameters, optimizer and checkpoints.

Every parameter names its logical axes on the line that makes it (`param`); `RULES` maps them to mesh axes; `state_shardings` turns
an abstract state into shardings that init, step and restore share. Without a mesh the axes are inert, so that notebooks, tests
and importers need none.
"""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cispo_jax import distributed
from cispo_jax.config import ConfigError, MeshSettings, SamplingMeshSettings

AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")  # mesh axes that split the rows of a batch

# Logical axis of a parameter -> mesh axis. None = replicated.
RULES = (
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head_dim", None),
    ("mlp", "tensor"),
    ("expert", "expert"),
    ("norm", None),
)


def param(key: jax.Array | None, init: Callable, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """The only place where parameters are made: float32 master weights with their logical axes as metadata."""
    return nnx.Param(init(key, shape, np.float32), out_sharding=axes, eager_sharding=False)


def make_mesh(settings: MeshSettings = MeshSettings(), devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh data x fsdp x expert x tensor over `devices` (all by default); a size of -1 takes the devices that are left."""
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(settings, axis) for axis in AXES}
    described = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    bad = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    if len(free) > 1 or bad:
        raise ConfigError(f"{described}: sizes are positive, and at most one is -1 (= the devices that are left).")
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if free:
        sizes[free[0]], rest = divmod(len(devices), fixed)
    if (free and (rest or not sizes[free[0]])) or int(np.prod(list(sizes.values()))) != len(devices):
        raise ConfigError(
            f"{described} does not fit {len(devices)} device(s): the product of the sizes must be {len(devices)}; set one "
            "of them to -1 to take what is left."
        )
    # Auto: shardings propagate by themselves; the default of jax.make_mesh would be Explicit.
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def state_shardings(abstract: Any, mesh: Mesh) -> Any:
    """Shardings of an abstract state (`jax.eval_shape(init)`): parameters by `RULES`, moments like their parameters."""
    with nnx.logical_axis_rules(RULES):
        return nnx.get_named_sharding(abstract, mesh)


def check_divisible(abstract: Any, shardings: Any, mesh: Mesh) -> None:
    """Raises a `ConfigError` that names the parameter and the mesh sizes if a dimension does not split evenly."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract)
    for (path, leaf), placed in zip(leaves, jax.tree.leaves(shardings), strict=True):
        for size, axis in zip(leaf.shape, placed.spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                name = jax.tree_util.keystr(path).removesuffix(".value").strip(".")
                valid = [n for n in range(1, mesh.size + 1) if size % n == 0 and mesh.size % n == 0]
                raise ConfigError(
                    f"config.mesh.{axis}={mesh.shape[axis]} does not divide a dimension of size {size} of the parameter {name} "
                    f"{leaf.shape}: valid sizes for it on {mesh.size} devices are {', '.join(map(str, valid))}."
                )


def sampling_mesh(mesh: Mesh, settings: SamplingMeshSettings | None = None) -> Mesh:
    """The devices of `mesh`, in their order, with all that split the parameters over fsdp on the data axis: no token gathers a weight.

    The experts and the rest of the layers stay split over `settings.expert` and `settings.tensor` devices; 0: as in training.
    """
    expert, tensor = (getattr(settings, axis, 0) or mesh.shape[axis] for axis in ("expert", "tensor"))
    if mesh.size % (expert * tensor):
        raise ConfigError(
            f"config.mesh.sampling.expert={expert} x config.mesh.sampling.tensor={tensor} does not divide the {mesh.size} devices; "
            "valid are sizes whose product does (0: as in training)."
        )
    devices = mesh.devices.reshape(-1, 1, expert, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


class OnMesh:
    """A function that is called, and lowered, where `jax.sharding.get_abstract_mesh()` gives the mesh: layers see how to split work."""

    def __init__(self, mesh: Mesh, function: Any):
        self.mesh, self.function = mesh, function

    def __call__(self, *args: Any, **options: Any) -> Any:
        with jax.set_mesh(self.mesh):
            distributed.settle(args)
            return distributed.settle(self.function(*args, **options))

    def lower(self, *args: Any, **options: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return self.function.lower(*args, **options)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over every batch axis of the mesh, columns whole."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_devices(mesh: Mesh) -> int:
    """How many ways the rows of a batch are split: row counts must be a multiple of it."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH]))


def shard_rows(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """Host rows split over the batch axes of the mesh; whole on every device where they do not divide."""
    return distributed.from_host(x, replicated(mesh) if len(x) % batch_devices(mesh) else batch_sharding(mesh))
