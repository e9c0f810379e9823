"""Problems from a JSONL or Parquet file with a prompt and an answer in each row."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from etils import epath

from cispo_jax.config import ConfigError, DataSettings, suggest
from cispo_jax.data import hub
from cispo_jax.rewards.scoring import number_value

Row = tuple[str, dict[str, Any]]  # where it stands ("line 3"), its fields


@dataclass(frozen=True)
class FileProblems:
    """The different problems of a file in its order, and how many rows repeated one of them."""

    examples: list[dict[str, Any]]
    duplicates: int


def read(
    path: str,
    settings: DataSettings,
    setting: str,
    reader: Callable[[dict[str, Any], str], dict[str, Any]] | None = None,
) -> FileProblems:
    """Reads a file; text, numbers and UTF-8 bytes become `str`, other fields stay for the user's rewards.

    Args:
      path: `.jsonl` or `.parquet`, local or any place `etils.epath` opens, or `hf:org/name@revision:FILE`.
      settings: names of the two fields.
      reader: turns a row into `prompt`, `answer` and other fields where the file has a shape of its own (`math_sets`).
      setting: the setting that holds `path`, for error messages.

    Raises:
      ConfigError: naming file, row and field of what is wrong. The same prompt (or id) with different answers is wrong.
    """
    file = locate(path, setting)
    examples: dict[str, dict[str, Any]] = {}
    first_seen: dict[str, str] = {}
    by_id: dict[str, str] = {}
    duplicates = 0
    for where, row in READERS[file.suffix](file, setting):
        place = f"{setting}={path}, {where}"
        example = _example(row, settings, place) if reader is None else _read_by(reader, row, place)
        prompt = example["prompt"]
        if prompt in examples:
            if not _same(examples[prompt]["answer"], example["answer"]):
                raise ConfigError(
                    f"{setting}={path}: {first_seen[prompt]} and {where} hold the same prompt with different answers, "
                    f"{examples[prompt]['answer']!r} and {example['answer']!r}: {prompt[:80]!r}."
                )
            duplicates += 1
            continue
        example.setdefault("id", f"{file.stem}-{where.split()[1]}")
        if example["id"] in by_id:
            raise ConfigError(
                f"{setting}={path}: {by_id[example['id']]} and {where} hold the same id {example['id']!r} with "
                "different prompts. Rename the field or make the ids unique."
            )
        examples[prompt], first_seen[prompt], by_id[example["id"]] = example, where, where
    if not examples:
        raise ConfigError(f"{setting}={path}: the file holds no row.")
    return FileProblems(list(examples.values()), duplicates)


def locate(path: str, setting: str) -> epath.Path:
    """The file behind a path of `read`."""
    file = hub.fetch_data(path, setting) if hub.is_hub(path) else epath.Path(path).expanduser()
    if file.suffix not in READERS:
        raise ConfigError(f"{setting}={path}: the name must end in {' or '.join(READERS)}.")
    if not file.is_file():
        names = [near.name for near in file.parent.iterdir() if near.suffix in READERS] if file.parent.is_dir() else []
        there = f"{file.parent} holds: {', '.join(sorted(names))}." if names else f"{file.parent} holds no such file."
        raise ConfigError(f"{setting}={path}: there is no such file.{suggest(file.name, names)} {there}")
    return file


def _read_by(
    reader: Callable[[dict[str, Any], str], dict[str, Any]], row: dict[str, Any], where: str
) -> dict[str, Any]:
    example = {name: _plain(value) for name, value in reader(row, where).items()}
    names = ("prompt", "answer", "id") if "id" in example else ("prompt", "answer")
    return example | {name: _text(example[name], f"{where}, field {name!r}") for name in names}


def _read_jsonl(file: epath.Path, setting: str) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{setting}={file}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where} is not UTF-8 text: {error}.") from None
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{where} is not JSON ({error}): {line.decode('utf-8', 'replace').strip()!r:.60}."
                ) from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where} is a JSON {type(row).__name__}, not an object with fields.")
            yield f"line {number}", row


def _read_parquet(file: epath.Path, setting: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with file.open("rb") as stream:
            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(
                4096
            ):  # some files repeat a problem 100 times
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{setting}={file} cannot be read as Parquet: {error}.") from error


READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _example(row: dict[str, Any], settings: DataSettings, where: str) -> dict[str, Any]:
    example = {name: _plain(value) for name, value in row.items()}
    for name, field in (("prompt", settings.prompt_field), ("answer", settings.answer_field)):
        if field not in row:
            names = list(row)
            raise ConfigError(
                f"{where} has no field {field!r} (config.data.{name}_field).{suggest(field, names)} "
                f"It has: {', '.join(names) or 'no field at all'}."
            )
        example[name] = _text(row[field], f"{where}, field {field!r}")
    if "id" in row:
        example["id"] = _text(row["id"], f"{where}, field 'id'")
    return example


def _text(value: Any, where: str) -> str:
    value = _plain(value)
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(value))  # whose "f" format never writes an exponent
    if isinstance(value, bool | int):
        value = str(value)
    elif isinstance(value, Decimal):
        value = format(value, "f")
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r:.60}; it must hold text or a number.")
    if not value.strip():
        raise ConfigError(f"{where} is empty.")
    return value


def _same(a: str, b: str) -> bool:
    return a == b or (number_value(a) is not None and number_value(a) == number_value(b))


def _plain(value: Any) -> Any:
    """A value that JSON can hold: bytes as text, dates in ISO form."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value
