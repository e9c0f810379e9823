"""What stands in for things of a config that are not on this machine, and the small model and files that the rehearsal trains on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import tokenizers

from cispo_jax import models, weights
from cispo_jax.building import Run
from cispo_jax.config import Config, ConfigError, DataSettings, EvaluationSettings, suggest
from cispo_jax.data import hub, math_sets
from cispo_jax.data.tokenizers import Tokenizer, byte_level_bpe, save_tokenizer
from experiments.rehearse import shrink

SMALL = 5_000_000  # parameters up to which a preset is trained as it is
BYTES_OF_A_TOKEN = 8  # at most, about: prompts are that much longer in the byte-level tokenizer
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass
class Model:
    """In place of a model whose weights are not here: `building.build` asks for no more."""

    config: models.TransformerConfig


def find(config: Config, folder: Path) -> tuple[Config, Model | None, list[str]]:
    """The config at its full size with stand-ins, in `folder`, for what is not here; one note for each.

    Hub caches are looked into, nothing is fetched.

    Raises:
      ConfigError: neither the weights nor a preset of their architecture are here, or a spec of the hub is malformed.
    """
    notes: list[str] = []
    model, settings = None, config.model
    if settings.weights and _is_absent(settings.weights, whole=True):
        if settings.preset not in models.PRESETS:
            raise ConfigError(
                f"config.model.preset={settings.preset!r}: config.model.weights={settings.weights} is not on this machine, and its "
                f"architecture must be named; valid values are {', '.join(models.PRESETS)}."
                + suggest(settings.preset, models.PRESETS)
            )
        model = Model(models.PRESETS[settings.preset])
        notes.append(
            f"config.model.weights={settings.weights} is not on this machine: the architecture is that of config.model.preset="
            f"{settings.preset}"
        )
        settings = dataclasses.replace(settings, weights="", tokenizer=settings.tokenizer or settings.weights)
    data = dataclasses.replace(config.data, directory=str(folder / "data"))
    if settings.tokenizer and _is_absent(settings.tokenizer):
        notes.append(
            f"the tokenizer of {settings.tokenizer} is not on this machine: one token a byte, chat template of ChatML; lengths of "
            "prompts in tokens and the model's own template are not rehearsed"
        )
        path = folder / "tokenizer"
        path.mkdir(parents=True)
        save_tokenizer(byte_tokenizer(), path)
        settings = dataclasses.replace(settings, tokenizer=str(path / "tokenizer.json"))
        data = dataclasses.replace(data, max_prompt_tokens=BYTES_OF_A_TOKEN * data.max_prompt_tokens)
    files: dict[str, Any] = {}
    for name in ("source", "eval_source"):
        if _is_absent_file(getattr(data, name)):
            path = folder / f"fixture_{name}.jsonl"
            fields = write_fixture(path, data, first=1000 * (name == "eval_source"), responses=config.sft.num_steps > 0)
            notes.append(
                f"config.data.{name}={getattr(data, name)} is not on this machine: made-up sums with the fields {', '.join(fields)}"
            )
            files[name] = str(path)
    data = dataclasses.replace(data, **files)
    evaluation = dataclasses.replace(config.evaluation, sets=_sets(config, data, folder, notes))
    return dataclasses.replace(config, model=settings, data=data, evaluation=evaluation), model, notes


def _sets(config: Config, data: DataSettings, folder: Path, notes: list[str]) -> dict[str, Any]:
    """`config.evaluation.sets`, with made-up problems for files that are not here."""
    sets: dict[str, Any] = {}
    for number, (name, table) in enumerate(config.evaluation.sets.items()):
        if isinstance(table, Mapping) and _is_absent_file(str(table.get("source", ""))):
            path = folder / f"fixture_{name}.jsonl"
            write_fixture(path, data, first=10_000 * (number + 1), responses=False)
            notes.append(f"config.evaluation.sets.{name}.source={table['source']} is not on this machine: made-up sums")
            table = dict(table) | {"source": str(path)}
        sets[name] = table
    return sets


def _is_absent(path: str, *, whole: bool = False) -> bool:
    """Whether a tokenizer (`whole`: a model) has to be fetched first. One in a bucket too: it is not looked into."""
    if not hub.is_hub(path):
        return "://" in path
    try:
        folder = hub.fetch_tokenizer(path, "config.model.weights")
    except hub.NotFetched:
        return True
    return not any(folder.glob("*.safetensors" if whole else "tokenizer.json"))


def _is_absent_file(path: str) -> bool:
    path = math_sets.split_source(path)[1]
    if hub.is_hub(path):
        try:
            hub.fetch_data(path, "config.data.source")
        except hub.NotFetched:
            return True
        return False
    if not path.endswith((".jsonl", ".parquet")):
        return False  # generated, or an error of `data.load`
    return "://" in path or not Path(path).expanduser().is_file()


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and the special tokens of ChatML."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = byte_level_bpe([*special, *alphabet], [], split="gpt-2", special=special)
    return Tokenizer(backend, eos_ids=[0, 2], pad_id=0, chat_template=CHAT, special_tokens={"eos_token": "<|im_end|>"})


def write_fixture(path: Path, settings: DataSettings, *, first: int, responses: bool) -> list[str]:
    """Sums in the form of the file that is missing; returns the fields of a row."""
    rows = []
    for n in range(first, first + 2 * shrink.PROBLEMS):
        row = {settings.prompt_field: f"What is {n} + {n % 7}?", settings.answer_field: str(n + n % 7)}
        rows.append(row | ({"response": row[settings.answer_field]} if responses else {}))
    _write(path, rows)
    return list(rows[0])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def small_files(run: Run, config: Config, folder: Path) -> DataSettings:
    """The settings of the rehearsal's problems: of a file those with the shortest prompts, written to `folder`."""
    settings, whole = config.data, run.config.data
    settings = dataclasses.replace(settings, directory=whole.directory, max_prompt_tokens=whole.max_prompt_tokens)
    held_out = shrink.PROBLEMS // 4
    shortest = lambda examples, count: sorted(examples, key=lambda example: len(run.encode(example)))[:count]
    if whole.eval_source:
        _write(folder / "held_out.jsonl", shortest(run.problems.evaluation, held_out))
        settings = dataclasses.replace(settings, eval_source=str(folder / "held_out.jsonl"))
    if whole.source.endswith((".jsonl", ".parquet")) or hub.is_hub(whole.source):
        parts = [(run.problems.train, shrink.PROBLEMS)] + [(run.problems.evaluation, held_out)] * (
            not whole.eval_source
        )
        _write(folder / "problems.jsonl", [row for rows, count in parts for row in shortest(rows, count)])
        settings = dataclasses.replace(settings, source=str(folder / "problems.jsonl"))
    return settings


def small_sets(run: Run, config: Config) -> EvaluationSettings:
    """The evaluation of the rehearsal, its benchmarks from the files that the run at full size found or made."""
    full = run.config.evaluation.sets
    sets = {name: dict(table) | {"source": full[name]["source"]} for name, table in config.evaluation.sets.items()}
    return dataclasses.replace(config.evaluation, sets=sets)


def small_model(
    run: Run, config: Config, folder: Path
) -> tuple[Any, models.TransformerConfig, models.TransformerConfig]:
    """The `config.model` of the rehearsal, its architecture and that of the config.

    Random weights in a model folder in `folder`; a small preset without weights is taken as it is.

    Raises:
      ConfigError: the architecture cannot be written, so that the export of the run would fail.
    """
    full: models.TransformerConfig = run.abstract_state.model.config
    if not config.model.weights and models.count_parameters(full).total <= SMALL:
        return run.config.model, full, full
    # A vocabulary is as large as its tokenizer asks for; the stand-in's is small.
    vocab_size = full.vocab_size if run.config.model == config.model else -(-run.tokenizer.vocab_size // 8) * 8
    small = dataclasses.replace(shrink.shrink_architecture(full), vocab_size=vocab_size)
    model = jax.jit(lambda: models.Transformer(small, key=jax.random.key(config.seed)))()
    weights.save_pretrained(folder / "model", model, small, run.tokenizer)
    tokenizer = config.model.tokenizer if run.config.model == config.model else ""
    settings = dataclasses.replace(config.model, weights=str(folder / "model"), tokenizer=tokenizer)
    return settings, small, full
