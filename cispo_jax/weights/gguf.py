"""GGUF in: one file with the weights, the architecture, the tokenizer and the chat template of a Llama-family model.

The format is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a little-endian header of typed
metadata and tensor descriptions, then aligned blobs. The header is parsed here (0.15 s for a vocabulary of 49,152 where
`gguf.GGUFReader`, which keeps an array for each string, takes 4.5 s); blobs are dequantized by the `gguf` package, so
whatever it dequantizes is read.

llama.cpp rotates adjacent pairs, so its converter permutes the rows of each query and key head; that is undone here,
because `cispo_jax.models` rotates the half-split pairs of Hugging Face checkpoints.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import gguf
import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, Sharding

from cispo_jax.config import ConfigError
from cispo_jax.data.tokenizers import Tokenizer, byte_level_bpe
from cispo_jax.models import Transformer, TransformerConfig
from cispo_jax.sharding import state_shardings

# ---------------------------------------------------------------------------------------------------------------------
# The file


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its quantization, its shape in row-major order, its first byte and its length in bytes."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """The parsed header of a GGUF file; tensor data stay on disk until `read`."""

    path: epath.Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str, file: BinaryIO) -> np.ndarray:
        """One tensor, dequantized to float32 in its row-major shape."""
        info = self.tensors[name]
        file.seek(info.offset)
        rows = np.frombuffer(file.read(info.num_bytes), np.uint8).reshape(*info.shape[:-1], -1)
        try:
            values = gguf.dequantize(rows, info.kind)
        except NotImplementedError:
            raise ConfigError(
                f"{self.path}: tensor {name} is stored as {info.kind.name}, which the gguf package does not dequantize."
            ) from None
        return values.reshape(info.shape)


class _Malformed(Exception):
    """The bytes are not those of a whole GGUF file."""


_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # GGUF value types
_STRING, _ARRAY, _UINT32, _UINT64 = 8, 9, 4, 10
_FORMATS = {code: struct.Struct("<" + letter) for code, letter in _SCALARS.items()}


class _Header:
    """Reads the typed values of the header one after the other."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size, self.position = file, size, 0

    def take(self, count: int) -> bytes:
        # Checked before reading: a corrupt length must not become a huge allocation.
        if count > self.size - self.position:
            raise _Malformed("the file ends inside its header")
        self.position += count
        return self.file.read(count)

    def number(self, kind: int) -> Any:
        if kind not in _FORMATS:
            raise _Malformed(f"unknown value type {kind} in the header")
        return _FORMATS[kind].unpack(self.take(_FORMATS[kind].size))[0]

    def string(self) -> str:
        return self.take(self.number(_UINT64)).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(kind)
        item, count = self.number(_UINT32), self.number(_UINT64)
        if item not in _FORMATS and item != _STRING:
            raise _Malformed(f"unknown array type {item} in the header")
        if item == _STRING:
            return [self.string() for _ in range(count)]
        values = self.take(count * _FORMATS[item].size)
        return [value for (value,) in _FORMATS[item].iter_unpack(values)]


def open_gguf(path: epath.PathLike) -> GgufFile:
    """Parses the header and checks that every tensor lies inside the file."""
    path = epath.Path(path)
    size = path.stat().length
    try:
        with path.open("rb") as file:
            metadata, tensors = _parse(_Header(file, size))
    except (_Malformed, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a whole GGUF file of version 2 or 3 ({error}); {size} bytes.") from None
    end, last = max(((info.offset + info.num_bytes, name) for name, info in tensors.items()), default=(0, ""))
    if end > size:
        raise ConfigError(
            f"{path} is truncated: it has {size} bytes, and its last tensor {last} ends at byte {end}. Fetch it again."
        )
    return GgufFile(path, metadata, tensors)


def _parse(header: _Header) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if header.size < 4 or header.take(4) != b"GGUF":
        raise _Malformed("it does not start with the bytes GGUF")
    version = header.number(_UINT32)
    if version not in (2, 3):
        raise _Malformed(f"version {version}, or big-endian")
    num_tensors, num_keys = header.number(_UINT64), header.number(_UINT64)
    metadata = {}
    for _ in range(num_keys):
        key = header.string()
        metadata[key] = header.value(header.number(_UINT32))
    described = {}
    for _ in range(num_tensors):
        name, rank = header.string(), header.number(_UINT32)
        shape = tuple(header.number(_UINT64) for _ in range(rank))[::-1]  # the file lists the fastest axis first
        kind, offset = header.number(_UINT32), header.number(_UINT64)
        if kind not in iter(gguf.GGMLQuantizationType) or not shape:
            raise _Malformed(f"tensor {name} has unknown type {kind} or no shape")
        kind = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise _Malformed(f"rows of {shape[-1]} in tensor {name} are not whole {kind.name} blocks of {block}")
        described[name] = kind, shape, offset, prod(shape) // block * block_bytes
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    start = -(-header.position // alignment) * alignment
    return metadata, {
        name: TensorInfo(kind, shape, start + offset, num_bytes)
        for name, (kind, shape, offset, num_bytes) in described.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# The architecture

# `llama.*` keys that are read, or that do not enter the mathematics.
_KNOWN = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
# Further keys and the values at which they change nothing.
_NEUTRAL = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (0.0, 1.0),
}


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def architecture(file: GgufFile) -> TransformerConfig:
    """The `llama.*` metadata as a `TransformerConfig`; a setting that may change the mathematics is refused by name."""
    family = file.metadata.get("general.architecture")
    if family != "llama":
        raise ConfigError(
            f"{file.path}: general.architecture={family!r} is not supported in GGUF files; supported: 'llama'."
        )
    llama = {key[len("llama.") :]: value for key, value in file.metadata.items() if key.startswith("llama.")}
    refused = [
        f"llama.{key}={value!r}"
        for key, value in llama.items()
        if key not in _KNOWN and value not in _NEUTRAL.get(key, ())
    ]
    heads, embed_dim = _get(file, "llama.attention.head_count"), _get(file, "llama.embedding_length")
    head_dim = llama.get("attention.key_length", embed_dim // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if llama.get(key, head_dim) != head_dim:
            refused.append(f"llama.{key}={llama[key]!r} (only the head dimension, {head_dim})")
    if "rope_freqs.weight" in file.tensors:
        refused.append("the tensor rope_freqs.weight (rotary frequencies rescaled as in Llama 3.1)")
    if refused:
        raise ConfigError(
            f"{file.path}: settings that are not supported and may change the mathematics: {'; '.join(refused)}."
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    try:
        return TransformerConfig(
            vocab_size=llama.get("vocab_size", len(tokens)),
            embed_dim=embed_dim,
            num_layers=_get(file, "llama.block_count"),
            num_heads=heads,
            num_kv_heads=_get(file, "llama.attention.head_count_kv") if "attention.head_count_kv" in llama else heads,
            head_dim=head_dim,
            mlp_dim=_get(file, "llama.feed_forward_length"),
            rope_theta=_decimal(llama.get("rope.freq_base", 10_000.0)),
            norm_eps=_decimal(_get(file, "llama.attention.layer_norm_rms_epsilon")),
            tied_head="output.weight" not in file.tensors,
        )
    except ValueError as error:
        raise ConfigError(f"{file.path}: {error}.") from None


def _get(file: GgufFile, key: str) -> Any:
    """A number of the metadata; lists with one value a layer are refused."""
    value = file.metadata.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{file.path}: {key}={value!r} in the metadata; expected one positive number.")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# The weights


def tensor_table(config: TransformerConfig) -> dict[str, tuple[list[str], tuple[int, ...]]]:
    """Parameter -> the tensors of the file that make it (one a layer where stacked), and the shape each has there."""
    D, N, M, H, F = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_dim
    whole = {"embedding": ("token_embd", (config.vocab_size, D)), "final_norm": ("output_norm", (D,))}
    if not config.tied_head:
        whole["head"] = ("output", (config.vocab_size, D))
    layer = {
        "attention_norm": ("attn_norm", (D,)),
        "attention.query": ("attn_q", (N * H, D)),
        "attention.key": ("attn_k", (M * H, D)),
        "attention.value": ("attn_v", (M * H, D)),
        "attention.output": ("attn_output", (D, N * H)),
        "mlp_norm": ("ffn_norm", (D,)),
        "mlp.gate": ("ffn_gate", (F, D)),
        "mlp.up": ("ffn_up", (F, D)),
        "mlp.down": ("ffn_down", (D, F)),
    }
    return {name: ([f"{source}.weight"], shape) for name, (source, shape) in whole.items()} | {
        f"layers.0.{name}": ([f"blk.{index}.{source}.weight" for index in range(config.num_layers)], shape)
        for name, (source, shape) in layer.items()
    }


def load_config(file: GgufFile) -> TransformerConfig:
    """The architecture, after a check that the file's tensors are exactly those of this architecture."""
    config = architecture(file)
    _check_tensors(file, {source: shape for sources, shape in tensor_table(config).values() for source in sources})
    return config


def load_model(file: GgufFile, *, mesh: Mesh | None = None, dtype=np.float32) -> tuple[Transformer, TransformerConfig]:
    """The model, on the mesh's shards (without a mesh: on the default device), made one stacked leaf at a time.

    Peak host memory is the model itself (on CPU), its largest stacked leaf and one dequantized tensor.
    """
    config = load_config(file)
    table = tensor_table(config)
    abstract = jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0)))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    shardings = [None] * len(leaves) if mesh is None else jax.tree.leaves(state_shardings(abstract, mesh))
    arrays = []
    with file.path.open("rb") as data:
        for (path, leaf), sharding in zip(leaves, shardings, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            values = np.empty(leaf.shape, dtype)
            layers = values if name.startswith("layers.") else values[None]
            for layer, source in zip(layers, table[name][0], strict=True):
                tensor = file.read(source, data)
                if name in ("layers.0.attention.query", "layers.0.attention.key"):
                    tensor = _half_split(tensor, config.head_dim)
                layer[...] = (tensor if name == "embedding" else tensor.T).reshape(layer.shape)
            arrays.append(_place(values, sharding))
    return jax.tree.unflatten(treedef, arrays), config


def _half_split(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from llama.cpp's order (0, H/2, 1, H/2 + 1, ...) back to 0, 1, 2, ..."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _place(values: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(values)
    # Each process hands over its own shards only; device_put would compare the whole array across processes.
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _check_tensors(file: GgufFile, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Missing, unknown and misshaped tensors, all in one error."""
    misshaped = [
        f"{name} is {list(file.tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in file.tensors and file.tensors[name].shape != shape
    ]
    problems = {
        "missing": [name for name in expected if name not in file.tensors],
        "unknown": [name for name in file.tensors if name not in expected],
        "misshaped": misshaped,
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise ConfigError(f"{file.path}: its tensors are not those of its metadata. {listed}.")


def _some(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")  # end a turn in chat templates; older files name only the end of text as EOS


def load_tokenizer(file: GgufFile) -> Tokenizer:
    """The byte-level BPE and the chat template inside the file.

    EOS is a set: the end ids of the metadata (eos, eot, eom) and the control token that ends a chat turn.
    """
    ggml = {
        key[len("tokenizer.ggml.") :]: value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if ggml.get("model") != "gpt2":
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model={ggml.get('model')!r} is not supported; supported: 'gpt2' "
            "(byte-level BPE). Set config.model.tokenizer to a tokenizer.json instead."
        )
    tokens, kinds, merges = (ggml.get(key) for key in ("tokens", "token_type", "merges"))
    if not tokens or not merges or not kinds or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ConfigError(
            f"{file.path}: the tokenizer in the metadata is not whole: tokenizer.ggml.tokens (distinct), one "
            "token_type for each token, and merges are needed. Set config.model.tokenizer to a tokenizer.json instead."
        )
    backend = byte_level_bpe(
        tokens,
        merges,
        split=str(ggml.get("pre")),
        special=[token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL],
        added=[token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED],
    )
    ids = {name: ggml[f"{name}_token_id"] for name in ("bos", "eos", "eot", "eom") if f"{name}_token_id" in ggml}
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends += [tokens.index(token) for token in _TURN_ENDS if token in tokens and kinds[tokens.index(token)] == _CONTROL]
    return Tokenizer(
        backend,
        eos_ids=ends,
        pad_id=ggml.get("padding_token_id"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        special_tokens={f"{name}_token": tokens[id] for name, id in ids.items() if name in ("bos", "eos")},
    )


def context_length(file: GgufFile) -> int:
    """The number of tokens the model was trained to see, SmolLM2: 8,192. Nothing in the model enforces it."""
    return _get(file, "llama.context_length")
