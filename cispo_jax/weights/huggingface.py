"""A Hugging Face model folder, in and out: config.json, *.safetensors, tokenizer files.

In: one stacked parameter at a time, each device's shard straight from its byte ranges. Out: one tensor of the file at a time, so that no
host ever holds the model; the files are shared out over the processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cispo_jax.config import ConfigError
from cispo_jax.data.tokenizers import Tokenizer, save_tokenizer
from cispo_jax.distributed import barrier, is_main
from cispo_jax.models import Transformer, TransformerConfig
from cispo_jax.sharding import check_divisible, state_shardings
from cispo_jax.weights import families, layout, safetensors
from cispo_jax.weights.layout import Leaf
from cispo_jax.weights.safetensors import Checkpoint

Index = tuple[slice, ...]

# ---------------------------------------------------------------------------------------------------------------------
# In


def read_settings(folder: epath.Path) -> dict[str, Any]:
    """The folder's config.json."""
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds no config.json: it is not a whole Hugging Face model folder.")
    return safetensors.read_json(folder / "config.json")


def load_config(folder: epath.Path) -> TransformerConfig:
    """The architecture, after a check that the folder's tensors are exactly those of this architecture; reads headers only."""
    return _open(folder)[0]


def context_length(folder: epath.Path) -> int | None:
    """`max_position_embeddings`; None where the config does not say."""
    return families.read_config(read_settings(folder), str(folder / "config.json")).context_length


def load_model(
    folder: epath.Path, *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> tuple[Transformer, TransformerConfig]:
    """The model on the mesh's shards (without a mesh: on the default device) and its architecture.

    A process reads the bytes of its own shards only. Host memory beside the devices' copy: one shard of one stacked parameter and 16 MiB.
    """
    config, checkpoint = _open(folder)
    abstract = jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0)))
    shardings = None
    if mesh is not None:
        shardings = state_shardings(abstract, mesh)
        check_divisible(config, mesh)
    with checkpoint:
        return read_tree(abstract, layout.leaves(config), checkpoint, shardings=shardings, dtype=dtype), config


def _open(folder: epath.Path) -> tuple[TransformerConfig, Checkpoint]:
    settings = read_settings(folder)
    config = families.read_config(settings, str(folder / "config.json"))
    checkpoint = safetensors.open_checkpoint(folder)
    needed = check_tensors(checkpoint, config)
    codes = {checkpoint.tensors[name].dtype for name in needed}
    named = {code: np.dtype(dtype).name for code, dtype in safetensors.FLOATS.items()}
    declared = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
    file_dtype = named[codes.pop()] if len(codes) == 1 else declared
    if file_dtype not in safetensors.DTYPES:
        raise ConfigError(
            f"{folder / 'config.json'}: dtype={declared!r}; the tensors have several dtypes, so it must be one of "
            f"{', '.join(safetensors.DTYPES)}."
        )
    return TransformerConfig(**{**vars(config), "file_dtype": file_dtype}), checkpoint


def check_tensors(checkpoint: Checkpoint, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that the architecture needs, by name with their shapes.

    Raises:
      ConfigError: tensors that are missing, unknown, misshaped or not floating-point numbers, all in one error.
    """
    found = checkpoint.tensors
    needed = {name: leaf.stored_shape for name, leaf, _ in _pieces(layout.leaves(config))}
    # A tied model may bring its head: transformers does not read it either.
    extra = {"lm_head.weight"} if config.tied_head else set()
    problems = {
        "missing": [name for name in needed if name not in found],
        "unknown": [name for name in found if name not in needed | dict.fromkeys(extra) and not _is_derived(name)],
        "misshaped": [
            f"{name} is {list(found[name].shape)} in {found[name].file.name}, expected {list(shape)}"
            for name, shape in needed.items()
            if name in found and found[name].shape != shape
        ],
        "not of floating-point numbers": [
            f"{name} is {found[name].dtype}"
            for name in needed
            if name in found and found[name].dtype not in safetensors.FLOATS
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise ConfigError(f"{checkpoint.folder}: its tensors are not those of its config.json. {listed}.")
    return needed


def _is_derived(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith(layout.DERIVED)


def _some(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _pieces(leaves: dict[str, Leaf]) -> Iterator[tuple[str, Leaf, tuple[int, ...]]]:
    """Every place of the stacked axes of every parameter: tensor, leaf, place."""
    for leaf in leaves.values():
        for place in itertools.product(*map(range, leaf.leading)):
            yield leaf.name(place), leaf, place


def path_name(path: Any) -> str:
    """`layers.0.attention.query` for a path of the model's tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def read_tree(
    abstract: Any, leaves: dict[str, Leaf], checkpoint: Checkpoint, *, shardings: Any = None, dtype: Any = jnp.float32
) -> Any:
    """A tree like `abstract` with every leaf read from the checkpoint, on `shardings` (None: the default device)."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    places = [None] * len(paths) if shardings is None else jax.tree.leaves(shardings)
    arrays = []
    for (path, expected), sharding in zip(paths, places, strict=True):
        leaf = leaves[path_name(path)]
        assert leaf.shape == expected.shape, (path_name(path), leaf.shape, expected.shape)
        read = functools.partial(read_shard, checkpoint, leaf, dtype=np.dtype(dtype))
        arrays.append(_place(read, leaf.shape, sharding))
    return jax.tree.unflatten(treedef, arrays)


def _place(read: Callable[[Index], np.ndarray], shape: tuple[int, ...], sharding: Sharding | None) -> jax.Array:
    """One array from its shards, read one after the other; devices that hold the same shard share one reading."""
    if sharding is None:
        return jax.device_put(read(tuple(slice(0, size) for size in shape)))
    devices: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, holders in devices.items():
        values = read(tuple(slice(*bound) for bound in bounds))
        # Finished before the next shard is read: a transfer in flight would keep this one in host memory too.
        arrays += [jax.block_until_ready(jax.device_put(values, device)) for device in holders]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def read_shard(checkpoint: Checkpoint, leaf: Leaf, index: Index, *, dtype: np.dtype) -> np.ndarray:
    """The part of a stacked parameter at `index` (slices with start and stop), from the byte ranges that hold it."""
    values = np.empty([part.stop - part.start for part in index], dtype)
    count = len(leaf.leading)
    in_axes = dict(zip(leaf.source.ours, index[count:], strict=True))
    in_axes["3"] = slice(leaf.source.part, leaf.source.part + 1)
    shape = tuple(leaf.sizes[axis] for axis in leaf.stored_axes)
    slices = tuple(in_axes[axis] for axis in leaf.stored_axes)
    for place in itertools.product(*(range(part.start, part.stop) for part in index[:count])):
        piece = values[tuple(i - part.start for i, part in zip(place, index, strict=False))]
        checkpoint.read_into(_as_stored(piece, leaf), leaf.name(place), shape, slices)
    return values


def _as_stored(piece: np.ndarray, leaf: Leaf) -> np.ndarray:
    """A view of one layer's (and expert's) parameter with the axes in the order of the file."""
    stored = leaf.stored_axes.replace("3", "")
    view = piece.transpose([leaf.source.ours.index(axis) for axis in stored])
    return np.expand_dims(view, leaf.stored_axes.index("3")) if "3" in leaf.stored_axes else view


# ---------------------------------------------------------------------------------------------------------------------
# Out


def save_model(
    folder: epath.Path,
    model: Any,
    config: TransformerConfig,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes the folder; `config.json` comes last, so that a folder which has one is whole. Every process must call it.

    Raises:
      ConfigError: the architecture is that of no published family, the folder already holds weights, or the dtype is not one of a file.
    """
    values = families.write_config(config)
    dtype_name = config.file_dtype if dtype is None else jnp.dtype(dtype).name
    if dtype_name not in safetensors.DTYPES:
        raise ConfigError(
            f"dtype={dtype_name!r}: weights are written as one of {', '.join(sorted(safetensors.DTYPES))}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    if present:
        raise ConfigError(f"{folder} already holds weights ({', '.join(present[:3])}); give a new folder.")
    barrier("looked into the folder")  # before the first process writes there
    tensors = tensors_of(model, config)
    ordered = dict(sorted(((name, pieces[0][1].stored_shape) for name, pieces in tensors.items()), key=_by_layer))
    shards = safetensors.plan_shards(ordered, jnp.dtype(dtype_name), max_shard_bytes)
    for number, (name, shard) in enumerate(shards.items()):
        pieces = (_assemble(tensors[tensor], jnp.dtype(dtype_name)) for tensor in shard.shapes)
        if number % jax.process_count() == jax.process_index():
            safetensors.write_shard(folder / name, shard, jnp.dtype(dtype_name), pieces)
        else:
            for _ in pieces:  # every process takes part in making each tensor
                pass
    barrier("wrote the weights")
    if is_main():
        if len(shards) > 1:
            (folder / safetensors.INDEX).write_text(json.dumps(safetensors.index_of(shards), indent=2))
        special = {} if tokenizer is None else save_tokenizer(tokenizer, folder)
        values |= {"dtype": dtype_name, "torch_dtype": dtype_name, "bos_token_id": None, "eos_token_id": None} | special
        (folder / "config.json").write_text(json.dumps(values, indent=2))
    barrier("wrote the folder")


Piece = tuple[Any, Leaf, tuple[int, ...]]  # array of the model, its leaf, place on the stacked axes


def tensors_of(model: Any, config: TransformerConfig) -> dict[str, list[Piece]]:
    """Every tensor of the files and the pieces of the model that it is made of (several for query, key and value in one)."""
    leaves = layout.leaves(config)
    arrays = {path_name(path): array for path, array in jax.tree_util.tree_flatten_with_path(model)[0]}
    if arrays.keys() != leaves.keys():
        different = sorted(arrays.keys() ^ leaves.keys())
        raise ConfigError(
            f"save_pretrained: model and config do not belong together; they differ in {_some(different)}."
        )
    tensors: dict[str, list[Piece]] = {}
    for path, leaf in leaves.items():
        if arrays[path].shape != leaf.shape:
            raise ConfigError(f"save_pretrained: {path} is {arrays[path].shape}, by the config it is {leaf.shape}.")
        for place in itertools.product(*map(range, leaf.leading)):
            tensors.setdefault(leaf.name(place), []).append((arrays[path], leaf, place))
    return tensors


def _by_layer(item: tuple[str, Any]) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def _assemble(pieces: list[Piece], dtype: np.dtype) -> np.ndarray:
    """One tensor as it lies in the file."""
    leaf = pieces[0][1]
    values = np.empty([leaf.sizes[axis] for axis in leaf.stored_axes], dtype)
    for array, leaf, place in pieces:
        piece = _as_stored(_fetch(array, place, dtype), leaf)
        part = [
            slice(leaf.source.part, leaf.source.part + 1) if axis == "3" else slice(None) for axis in leaf.stored_axes
        ]
        values[tuple(part)] = piece
    return values.reshape(leaf.stored_shape)


def _fetch(array: Any, place: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`array[place]` in the host's memory, gathered from the devices that hold it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[place]).astype(dtype)
    on_device = np.dtype(np.float32) if dtype.itemsize > 4 else dtype
    bits = _element(array.sharding, on_device.name)(array, np.array(place, np.int32))
    return np.asarray(bits.addressable_data(0)).view(on_device).astype(dtype, copy=False)


@functools.cache
def _element(sharding: Sharding, dtype: str) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """A program that takes one element of the stacked axes (layer, or layer and expert) to every device, as unsigned integers.

    No device holds more than its shard of a layer and the element; left to itself, XLA would gather the whole stacked array first.
    """
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()

    def keep(array, axes):
        if not isinstance(sharding, NamedSharding):
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(sharding.mesh, P(*spec[axes:])))

    def element(array, place):
        if len(place):
            array = keep(jax.lax.dynamic_index_in_dim(array, place[0], keepdims=False), 1)
        bits = jnp.uint16 if np.dtype(dtype).itemsize == 2 else jnp.uint32
        array = jax.lax.bitcast_convert_type(array.astype(dtype), bits)
        if len(place) == 2:
            # A sum over experts with one term that is not zero stays where the experts are; bits, because -0.0 + 0.0 is 0.0.
            expert = jax.lax.broadcasted_iota(jnp.int32, array.shape, 0)
            array = keep(jnp.sum(jnp.where(expert == place[1], array, 0), axis=0, dtype=bits), 2)
        return array

    whole = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
    return jax.jit(element, out_shardings=whole)
