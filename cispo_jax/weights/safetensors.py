"""The safetensors format, in and out: an 8-byte length, a JSON header with name, dtype, shape and place of every tensor, the bytes.

The header is parsed here: the safetensors package reads only local files, through a memory map whose pages count as memory of the
process, and writes a file only from tensors that are all in memory. Reading takes the wanted byte ranges, writing one tensor at a time.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from etils import epath

from cispo_jax.config import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
DTYPES = {np.dtype(dtype).name: code for code, dtype in FLOATS.items()}  # "bfloat16" -> "BF16"
_OTHER_SIZES = dict(BOOL=1, U8=1, I8=1, F8_E5M2=1, F8_E4M3=1, I16=2, U16=2, I32=4, U32=4, I64=8, U64=8)
_SIZES = {code: np.dtype(dtype).itemsize for code, dtype in FLOATS.items()} | _OTHER_SIZES
_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_CHUNK = 16 * 2**20  # bytes read at once


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its file, dtype code and shape, its first byte there."""

    file: epath.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """The tensors of a folder of safetensors files, by name; data stay on disk until `read_into`. A context manager."""

    def __init__(self, tensors: Mapping[str, TensorInfo], folder: epath.Path):
        self.tensors, self.folder = tensors, folder
        self._open: dict[epath.Path, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def read_into(self, view: np.ndarray, name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> None:
        """Fills `view` with `tensor.reshape(shape)[slices]`, converted to its dtype; reads no byte outside the slices.

        At most 16 MiB (or one row) are held beside `view`.
        """
        info = self.tensors[name]
        dtype = np.dtype(FLOATS[info.dtype])
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        whole = [s == slice(0, size) for s, size in zip(slices, shape, strict=True)]
        axis = max((i for i in range(len(shape)) if not whole[i]), default=0)  # later axes are contiguous
        step = max(1, _CHUNK // (strides[axis] * dtype.itemsize))
        for outer in itertools.product(*(range(s.start, s.stop) for s in slices[:axis])):
            rows = view[tuple(i - s.start for i, s in zip(outer, slices, strict=False))]
            start = sum(i * stride for i, stride in zip(outer, strides, strict=False))
            for first in range(slices[axis].start, slices[axis].stop, step):
                last = min(first + step, slices[axis].stop)
                part = slice(first - slices[axis].start, last - slices[axis].start)
                place = (start + first * strides[axis], (last - first) * strides[axis])
                # Not kept in a variable: two chunks would be held at a time.
                rows[part] = np.frombuffer(self._read(name, *place), dtype).reshape(-1, *shape[axis + 1 :])

    def _read(self, name: str, start: int, count: int) -> bytes:
        info = self.tensors[name]
        itemsize = _SIZES[info.dtype]
        if info.file not in self._open:
            self._open[info.file] = self._stack.enter_context(info.file.open("rb"))
        file = self._open[info.file]
        file.seek(info.offset + start * itemsize)
        data = file.read(count * itemsize)
        if len(data) != count * itemsize:
            raise ConfigError(f"{info.file}: tensor {name} ends too early: the file became shorter while it was read.")
        return data


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def open_checkpoint(folder: epath.Path) -> Checkpoint:
    """The headers of `model.safetensors`, or of the shards that `model.safetensors.index.json` names, checked.

    Raises:
      ConfigError: no safetensors in the folder, a missing or truncated file, a malformed header, an index that names a file
        outside the folder or a tensor that its file does not hold.
    """
    if (folder / SINGLE).exists():
        return Checkpoint(read_header(folder / SINGLE), folder)
    if (folder / INDEX).exists():
        return Checkpoint(_read_sharded(folder), folder)
    names = [entry.name for entry in folder.iterdir()]
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if len(found) == 1:
        return Checkpoint(read_header(folder / found[0]), folder)
    if found:
        raise ConfigError(
            f"{folder} holds {len(found)} *.safetensors files but no {INDEX}, which says what is in each: fetch it too."
        )
    pickles = sorted(name for name in names if re.search(r"\.(bin|pt|pth|pkl|ckpt)$", name))
    if pickles:
        raise ConfigError(
            f"{folder} holds weights only as {', '.join(pickles[:3])}: these are pickles, which can run any code when they are read, "
            "and are never opened here. Take a revision of the model with *.safetensors, or convert it with transformers' "
            "save_pretrained."
        )
    raise ConfigError(f"{folder} holds no *.safetensors file.")


def _read_sharded(folder: epath.Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{index}: no weight_map from tensor names to file names.")
    tensors: dict[str, TensorInfo] = {}
    for name in dict.fromkeys(places.values()):
        first = next(tensor for tensor, place in places.items() if place == name)
        if not re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII):
            raise ConfigError(
                f"{index}: it places tensor {first} in {name!r}; only names of *.safetensors files in the same folder are read."
            )
        if not (folder / name).exists():
            raise ConfigError(
                f"{folder / name}: this shard is missing; {index} places tensor {first} and others there."
            )
        tensors |= read_header(folder / name)
    for tensor, place in places.items():
        if tensor not in tensors or tensors[tensor].file.name != place:
            raise ConfigError(f"{folder / place}: it does not hold tensor {tensor}, which {index} places there.")
    return tensors


def read_header(path: epath.Path) -> dict[str, TensorInfo]:
    """What a safetensors file holds, after a check that its header is well formed and every tensor lies inside the file."""
    size = path.stat().length
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ConfigError(
                f"{path} is truncated or no safetensors file: it has {size} bytes, its header would have {length}."
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ConfigError(f"{path} is no safetensors file: its header is not JSON ({error}).") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is no safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        first, last = _offsets(entry)
        if first != end or not _well_formed(entry):
            raise ConfigError(f"{path}: the header's entry of tensor {name} is malformed: {str(entry)[:200]}.")
        end = last
        if 8 + length + end > size:
            raise ConfigError(
                f"{path} is truncated: it has {size} bytes, and tensor {name} ends at byte {8 + length + end}. Fetch it again."
            )
        tensors[name] = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), 8 + length + first)
    return tensors


def _offsets(entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets):
        return offsets[0], offsets[1]
    return -1, -1


def _well_formed(entry: dict[str, Any]) -> bool:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        return False
    first, last = _offsets(entry)
    return last - first == math.prod(shape) * _SIZES[dtype] if dtype in _SIZES else 0 <= first <= last


def read_json(path: epath.Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a JSON {type(content).__name__}, not an object.")
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass
class Shard:
    """A file to be written: its tensors' names and shapes in order."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_bytes: int = 0


def plan_shards(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, max_bytes: int) -> dict[str, Shard]:
    """File names and what goes into each: in order, at most `max_bytes` a file (a larger tensor has one to itself)."""
    shards = [Shard()]
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1].shapes and shards[-1].num_bytes + num_bytes > max_bytes:
            shards.append(Shard())
        shards[-1].shapes[name] = shape
        shards[-1].num_bytes += num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def write_shard(path: epath.Path, shard: Shard, dtype: np.dtype, tensors: Iterable[np.ndarray]) -> None:
    """Writes one file; `tensors` come one at a time in the order of `shard.shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name, shape in shard.shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data start at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, shape), tensor in zip(shard.shapes.items(), tensors, strict=True):
            assert tensor.shape == shape and tensor.dtype == dtype, name
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data if tensor.size else b"")


def index_of(shards: Mapping[str, Shard]) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`."""
    total = sum(shard.num_bytes for shard in shards.values())
    places = {tensor: name for name, shard in shards.items() for tensor in shard.shapes}
    return {"metadata": {"total_size": total}, "weight_map": places}
