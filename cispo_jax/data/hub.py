"""`hf:org/name@revision`: a model or data set of the Hugging Face hub, fetched once into its cache (extra `hub`)."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from etils import epath

from cispo_jax.config import ConfigError

PREFIX = "hf:"
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja")  # nothing that runs when it is read: no pickle, no Python
DATA_FILES = ("*.parquet", "*.jsonl")


class NotFetched(ConfigError):
    """What is named well but cannot be had here: no such repository, no network, or no `huggingface_hub`."""


def is_hub(path: epath.PathLike) -> bool:
    return str(path).startswith(PREFIX)


def fetch_model(spec: str, setting: str) -> epath.Path:
    """The folder of a model's safetensors, JSON and template files; `setting` names the spec in errors."""
    name, revision, file = _parse(spec, setting)
    if file:
        raise ConfigError(f"{setting}={spec!r}: a model is a whole repository; leave out :{file}.")
    return _fetch(name, revision, MODEL_FILES, "model", spec, setting)


def fetch_tokenizer(spec: str, setting: str) -> epath.Path:
    """The same folder, with the small files only."""
    name, revision, _ = _parse(spec, setting)
    return _fetch(name, revision, ("*.json", "*.jinja"), "model", spec, setting)


def fetch_data(spec: str, setting: str) -> epath.Path:
    """One file of a data set: `hf:org/name@revision:FILE`, or the only Parquet or JSON-lines file there is."""
    name, revision, file = _parse(spec, setting)
    if file and not file.endswith((".parquet", ".jsonl")):
        raise ConfigError(f"{setting}={spec!r}: only {' and '.join(DATA_FILES)} are read.")
    folder = _fetch(name, revision, (file,) if file else DATA_FILES, "dataset", spec, setting)
    found = sorted(path for pattern in DATA_FILES for path in pathlib.Path(folder).rglob(pattern))
    if file:
        found = [path for path in found if path.relative_to(folder).as_posix() == file]
    if len(found) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:10])
        raise ConfigError(
            f"{setting}={spec!r}: there is no such file."
            if file
            else f"{setting}={spec!r}: one of its files must be named, {PREFIX}{name}{_at(revision)}:FILE; there are {names or 'none'}."
        )
    return epath.Path(found[0])


def _parse(spec: str, setting: str) -> tuple[str, str | None, str]:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([\w./-]+))?", spec, re.ASCII)
    if match is None or ".." in spec:
        raise ConfigError(
            f"{setting}={spec!r}: the form is hf:ORGANISATION/NAME, hf:ORGANISATION/NAME@REVISION, for a file of a data set with :FILE."
        )
    return match[1], match[2], match[3] or ""


def _at(revision: str | None) -> str:
    return f"@{revision}" if revision else ""


def _fetch(name: str, revision: str | None, patterns: Sequence[str], kind: str, spec: str, setting: str) -> epath.Path:
    try:
        import huggingface_hub
    except ImportError:
        raise NotFetched(f"{setting}={spec!r} needs huggingface_hub: pip install 'cispo-jax[hub]'.") from None
    try:
        folder = huggingface_hub.snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=list(patterns)
        )
    except Exception as error:  # the library and its HTTP client raise many kinds
        why = str(error).strip().split("\n")[0]
        raise NotFetched(f"{setting}={spec!r} could not be fetched ({type(error).__name__}: {why}).") from None
    return epath.Path(folder)
