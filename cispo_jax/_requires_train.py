"""Imported first by whatever needs the [train] extra: without it, an import says what to install."""

import importlib.util

# Importable names of the packages in the [train] extra of pyproject.toml (tests/test_layering.py compares them).
PACKAGES = (
    "absl",
    "array_record",
    "etils",
    "flax",
    "gguf",
    "grain",
    "jinja2",
    "ml_collections",
    "optax",
    "orbax",
    "pyarrow",
    "tensorboardX",
    "tensorflow_datasets",
    "tokenizers",
)

_missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
if _missing:
    raise ImportError(
        f"the models, data and trainer of cispo_jax need {', '.join(_missing)}: pip install 'cispo-jax[train]'"
    )
