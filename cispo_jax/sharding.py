"""The mesh, the table of logical axis rules, and one sharding tree for parameters, optimizer and checkpoints.

Every parameter names its logical axes on the line that makes it (`param`); `RULES` maps them to mesh axes; `state_shardings` turns
an abstract state into shardings that init, step and restore share. Without a mesh the axes are inert, so that notebooks, tests
and importers need none.
"""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cispo_jax import distributed
from cispo_jax.config import ConfigError, MeshSettings, SamplingMeshSettings

AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")  # mesh axes that split the rows of a batch

# Logical axis of a parameter -> mesh axes. None = replicated. What every token meets is split over the expert axis too, whose devices
# have rows of their own: attention and embedding of a mixture are not held once for each share of the experts.
RULES: tuple[tuple[str, Any], ...] = (
    ("vocab", "tensor"),
    ("embed", ("fsdp", "expert")),
    ("expert_embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head_dim", None),
    ("mlp", "tensor"),
    ("expert", "expert"),
    ("norm", None),
)
SAMPLING_RULES = tuple((name, None if name == "embed" else axes) for name, axes in RULES)  # no token gathers a weight


def param(key: jax.Array | None, init: Callable, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """The only place where parameters are made: float32 master weights with their logical axes as metadata."""
    return nnx.Param(init(key, shape, np.float32), out_sharding=axes, eager_sharding=False)


def make_mesh(settings: MeshSettings = MeshSettings(), devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh data x fsdp x expert x tensor over `devices` (all by default); a size of -1 takes the devices that are left.

    Several slices (TPUs that only the data-centre network connects) split `data`, or else `fsdp`, whose devices talk least often.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(settings, len(devices))
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", 0), []).append(device)
    count = len(by_slice)
    axis = next((axis for axis in ("data", "fsdp") if sizes[axis] % count == 0), None)
    if axis is None:
        raise ConfigError(
            f"config.mesh.data={sizes['data']}, config.mesh.fsdp={sizes['fsdp']}: the {count} slices split one of the two, which must "
            f"be a multiple of {count}."
        )
    # Auto: shardings propagate by themselves; the default of jax.make_mesh would be Explicit.
    types = (AxisType.Auto,) * len(AXES)
    shape = tuple((sizes | {axis: sizes[axis] // count}).values())
    # A torus of 4 x 4 x 8 has no axis of 2: it may be split.
    place = functools.partial(mesh_utils.create_device_mesh, shape, allow_split_physical_axes=True)
    return Mesh(np.concatenate([place(d) for d in by_slice.values()], axis=AXES.index(axis)), AXES, axis_types=types)


def mesh_sizes(settings: MeshSettings, devices: int) -> dict[str, int]:
    """Devices along each axis, with -1 resolved."""
    sizes = {axis: getattr(settings, axis) for axis in AXES}
    described = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    bad = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    if len(free) > 1 or bad:
        raise ConfigError(f"{described}: sizes are positive, and at most one is -1 (= the devices that are left).")
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if free:
        sizes[free[0]], rest = divmod(devices, fixed)
    if (free and (rest or not sizes[free[0]])) or int(np.prod(list(sizes.values()))) != devices:
        raise ConfigError(
            f"{described} does not fit {devices} device(s): the product of the sizes must be {devices}; set one "
            "of them to -1 to take what is left."
        )
    return sizes


def state_shardings(abstract: Any, mesh: Mesh, rules: tuple = RULES) -> Any:
    """Shardings of an abstract state (`jax.eval_shape(init)`): parameters by the rules, moments like their parameters."""
    with nnx.logical_axis_rules(rules):
        return nnx.get_named_sharding(abstract, mesh)


def check_divisible(architecture: Any, mesh: Mesh, setting: str = "config.mesh", rules: tuple = RULES) -> None:
    """Raises a `ConfigError` that names the mesh size, what of the model it does not divide, and the sizes that do."""
    kinds = {*architecture.attention, *architecture.mlp}
    split = {
        "expert": ["num_experts"] * ("moe" in kinds),
        "fsdp": ["embed_dim"],
        "tensor": ["vocab_size", "num_heads"]
        + ["num_kv_heads"] * ("softmax" in kinds)
        + ["mlp_dim"] * ("dense" in kinds)
        + ["expert_dim", "shared_expert_dim"] * ("moe" in kinds),
    }
    for axis, names in split.items():
        sizes = {name: getattr(architecture, name) for name in names}
        # What is split over fsdp is split over the expert axis as well.
        other = mesh.shape["expert"] if axis == "fsdp" and dict(rules)["embed"] else 1
        divides = lambda n, sizes=sizes, other=other: all(size % (n * other) == 0 for size in sizes.values())
        if not divides(mesh.shape[axis]):
            wrong = [f"{name}={size:,}" for name, size in sizes.items() if size % (mesh.shape[axis] * other)]
            valid = [str(n) for n in range(1, mesh.size // other + 1) if mesh.size % (n * other) == 0 and divides(n)]
            times = f" x {setting}.expert={other}" if other > 1 else ""
            raise ConfigError(
                f"{setting}.{axis}={mesh.shape[axis]}{times} does not divide {', '.join(wrong)} of config.model: valid sizes of {axis} "
                f"on {mesh.size} devices are {', '.join(valid) or 'none'}."
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


def shards(axis: str) -> int:
    """How many devices an axis of the mesh at hand has; 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def batch_devices(mesh: Mesh | AbstractMesh) -> int:
    """How many ways the rows of a batch are split: row counts must be a multiple of it."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH]))


def shard_rows(mesh: Mesh, rows: Any) -> Any:
    """Host rows (a tree of arrays) split over the batch axes of the mesh; whole on every device where they do not divide."""
    layout = lambda x: replicated(mesh) if len(x) % batch_devices(mesh) else batch_sharding(mesh)
    return jax.tree.map(lambda x: distributed.from_host(x, layout(x)), rows)


def passes_layout(mesh: Mesh) -> Callable[[Any], NamedSharding]:
    """Of an array [M, R, ...], the R rows of each pass split over the batch axes of the mesh; a scalar is whole on every device."""
    return lambda x: NamedSharding(mesh, P(None, BATCH)) if np.ndim(x) else replicated(mesh)


def shard_passes(mesh: Mesh, arrays: Any) -> Any:
    """Host arrays laid out as `passes_layout` says."""
    layout = passes_layout(mesh)
    return jax.tree.map(lambda x: distributed.from_host(x, layout(x)), arrays)


def constrain(x: jax.Array, *spec: Any) -> jax.Array:
    """`x` laid out as `spec` says on the mesh that the program is traced under, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or set(AXES) - set(mesh.axis_names) or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return x  # without jit (JAX_DISABLE_JIT=1) an array lies where it lies
    return jax.lax.with_sharding_constraint(x, P(*spec))


def whole(x: jax.Array, *spec: Any) -> jax.Array:
    """`constrain` on the way forward only: a parameter is gathered here, once and not in every trip of a loop, and its gradient is not."""
    gathered = jax.custom_vjp(lambda x: constrain(x, *spec))
    gathered.defvjp(lambda x: (constrain(x, *spec), None), lambda _, gradient: (gradient,))
    return gathered(x)


def split_rows(x: jax.Array, axis: int = 0) -> jax.Array:
    """Keeps the rows of an activation split over the batch axes of the mesh that the program is traced under, if there is one.

    Left to itself, the compiler moves activations where it should gather weights. A number of rows that does not divide stays as it is.
    Where rows are not the first axis (a cache, stacked over layers) the other axes stay as they are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if set(AXES) - set(mesh.axis_names) or x.shape[axis] % batch_devices(mesh):
        return x
    spec: list[Any] = [P.UNCONSTRAINED if axis else None] * x.ndim
    spec[axis] = BATCH
    return constrain(x, *spec)
