"""From `data` settings to problems: generated sets (TFDS) and files, split into training and evaluation.

Measured on 2 cores of an AMD EPYC CPU, in CPU seconds, with `python -m timeit -p -n 1 -r 1` of
    from cispo_jax.config import DataSettings; from cispo_jax.data import load
    list(load(DataSettings(options={"max_value": 500}, train_size=20_000, directory="/tmp/sets")).train)
11.9 s the first time, 7.5 s the next: generating and writing take 4.4 s (4,600 problems a second), reading them one by
one, as training does, 6.5 s (3,000 a second; imports are the rest). A step of training reads 16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cispo_jax.config import ConfigError, DataSettings, suggest
from cispo_jax.data import files, math_sets, mixture
from cispo_jax.data.stream import Schedule
from cispo_jax.data.tasks import ArithmeticOptions, options_from
from cispo_jax.rewards import load_function, scoring, verdict_of

Example = dict[str, Any]
GYM, MIXTURE = "reasoning_gym:", "mixture"


@dataclass(frozen=True)
class Problems:
    """What to train and evaluate on.

    Attributes:
      train, evaluation: examples with random access; no prompt is in both.
      scorer: the data set's own reward function.
      verdict: `verdict(response, example)`, a category such as `right`, `wrong number`, `no number`.
      description: one line of counts for the log.
      schedules: of a mixture, by task.
    """

    train: Sequence[Example]
    evaluation: Sequence[Example]
    scorer: Callable[..., list[float | None]]
    verdict: Callable[[str, Example], str]
    description: str
    schedules: Mapping[str, Schedule] = field(default_factory=dict)


def load(settings: DataSettings) -> Problems:
    """Loads or generates the problems of a run.

    Raises:
      ConfigError: anything that is wrong with the settings or the files, naming the setting.
    """
    for name in ("train_size", "eval_size"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"config.data.{name}={getattr(settings, name)} must be at least 1.")
    if settings.source == MIXTURE or settings.tasks:
        return mixture.load(settings, load)
    if settings.source == "arithmetic" or settings.source.startswith(GYM):
        return _generated(settings)
    if "/" in settings.source or "." in settings.source:
        return _from_file(settings)
    named = [f"{name}:FILE" for name in math_sets.SETS]
    raise ConfigError(
        f"config.data.source={settings.source!r} is none of: arithmetic, {GYM}TASK, {', '.join(named)}, {MIXTURE}, a .jsonl or .parquet "
        f"file, hf:ORGANISATION/NAME:FILE." + suggest(settings.source, ["arithmetic", GYM, MIXTURE, *named])
    )


def _generated(settings: DataSettings) -> Problems:
    # Importing TFDS costs half a second that a file does not need.
    try:
        from cispo_jax.data import builders
    except ImportError as error:
        raise ConfigError(
            f"config.data.source={settings.source} needs TFDS ({error}): pip install 'cispo-jax[train]'."
        ) from error

    sizes = {"train_size": settings.train_size, "eval_size": settings.eval_size, "seed": settings.seed}
    scorer: Any
    if settings.source == "arithmetic":
        options = options_from(ArithmeticOptions, settings.options, "arithmetic")
        builder = builders.arithmetic(options, settings.directory, **sizes)
        scorer, verdict = scoring.exact_match, scoring.verdict
    else:
        if settings.eval_source:
            raise ConfigError(
                f"config.data.eval_source={settings.eval_source} cannot be scored by {settings.source}, whose "
                "scorer needs its own items. Leave it empty: problems of the task are held out."
            )
        task = settings.source.removeprefix(GYM)
        builder = builders.reasoning_gym(task, dict(settings.options), settings.directory, **sizes)
        scorer = scoring.ReasoningGymScorer(task, dict(settings.options))
        verdict = scorer.verdict
    train, evaluation = (Records(builder.as_data_source(split)) for split in ("train", "evaluation"))
    notes = [f"{count:,} {what} dropped" for what, count in builder.info.metadata.items() if count]
    if len(train) < settings.train_size:
        notes.append(f"config.data.train_size={settings.train_size:,} reduced: these are all there are")
    notes.append(f"in {builder.data_path}")
    if settings.eval_source:
        return _with_eval_file(settings, list(train), notes)
    return Problems(train, evaluation, scorer, verdict, _describe(settings.source, train, evaluation, notes))


def _from_file(settings: DataSettings) -> Problems:
    if settings.options:
        raise ConfigError(
            f"config.data.options={dict(settings.options)} is for generated problems; {settings.source} takes none."
        )
    examples, notes = _read(settings.source, settings, "config.data.source", "train")
    if settings.eval_source:
        return _with_eval_file(settings, examples, notes)
    return _held_out(examples, settings, notes, f"config.data.source={settings.source}")


def _read(source: str, settings: DataSettings, setting: str, split: str) -> tuple[list[Example], list[str]]:
    """The examples of a file and what is to be said about them; a public set (`math_sets`) goes through TFDS."""
    math_sets.check_name(source, setting)
    name, path = math_sets.split_source(source)
    if name:
        from cispo_jax.data import builders

        records, metadata = builders.math_set(name, path, settings, setting, split=split)
        examples, duplicates = list(Records(records)), metadata["duplicates"]
        notes = [f"{name} in {metadata['path']}"]
    else:
        found = files.read(source, settings, setting)
        examples, duplicates, notes = found.examples, found.duplicates, []
    total = len(examples) + duplicates
    return examples, [f"{duplicates:,} duplicates dropped (of {total:,} rows)"] * bool(duplicates) + notes


def load_evaluation(source: str, settings: DataSettings, where: str) -> tuple[list[Example], Callable[..., Any]]:
    """The problems of a file that is only evaluated, and its scorer; `where` is the setting that holds `source`."""
    examples, _ = _read(source, settings, f"{where}.source", "test")
    return examples, _scorer_of(source)[0]


def _scorer_of(source: str) -> tuple[Callable[..., Any], Callable[[str, Example], str]]:
    """Reward and verdicts of a file: those of the public set that it is, or exact match."""
    name, _ = math_sets.split_source(source)
    scorer = load_function(math_sets.SETS[name].scorer, "config.data.source") if name else scoring.exact_match
    return scorer, verdict_of(scorer)


def from_examples(examples: Problems | Sequence[Example], settings: DataSettings) -> Problems:
    """Problems from Python: a `Problems` as it is, or a list of dicts with `prompt` and `answer`, a part of them held out."""
    if isinstance(examples, Problems):
        return examples
    rows = [dict(example) for example in examples]
    for index, row in enumerate(rows):
        missing = [name for name in ("prompt", "answer") if not isinstance(row.get(name), str)]
        if missing:
            raise ConfigError(
                f"dataset[{index}] needs a text `{missing[0]}`; it has {', '.join(map(str, row)) or 'nothing'}."
            )
        row.setdefault("id", str(index))
    return _held_out(rows, settings, [], "dataset")


def _held_out(examples: list[Example], settings: DataSettings, notes: list[str], source: str) -> Problems:
    """A fifth of the examples, `eval_size` at most, is kept for evaluation."""
    count = min(settings.eval_size, max(1, len(examples) // 5))
    if len({example["prompt"] for example in examples}) < 2:
        held = "one problem" if examples else "no problem (it is empty)"
        raise ConfigError(f"{source} holds {held}; training and evaluation need one each.")
    if count < settings.eval_size:
        notes.append(f"config.data.eval_size={settings.eval_size} reduced to a fifth of the file")
    # By the prompt's own hash: adding or moving rows moves no other row between the splits' candidates.
    by_hash = sorted(examples, key=lambda example: _hash(settings.seed, example["prompt"]))
    evaluation, held_out = by_hash[:count], {example["prompt"] for example in by_hash[:count]}
    train = [example for example in examples if example["prompt"] not in held_out]
    description = _describe(source.removeprefix("config.data.source="), train, evaluation, notes)
    return Problems(train, evaluation, *_scorer_of(settings.source), description)


def _with_eval_file(settings: DataSettings, train: list[Example], notes: list[str]) -> Problems:
    examples, eval_notes = _read(settings.eval_source, settings, "config.data.eval_source", "test")
    evaluation = examples[: settings.eval_size]
    prompts = {example["prompt"] for example in evaluation}
    kept = [example for example in train if example["prompt"] not in prompts]
    if not kept:
        raise ConfigError(
            f"config.data.eval_source={settings.eval_source} holds every prompt of "
            f"config.data.source={settings.source}."
        )
    notes += [f"{settings.eval_source}: {note}" for note in eval_notes]
    if len(kept) < len(train):
        notes.append(f"{len(train) - len(kept):,} training problems dropped because they are evaluated")
    description = _describe(settings.source, kept, evaluation, notes)
    return Problems(kept, evaluation, *_scorer_of(settings.source), description)


def _describe(source: str, train: Sequence[Example], evaluation: Sequence[Example], notes: list[str]) -> str:
    counts = f"{len(train):,} training and {len(evaluation):,} held-out problems"
    return f"{source}: " + "; ".join([counts, *notes])


def _hash(seed: int, prompt: str) -> str:
    return hashlib.sha256(f"{seed}/{prompt}".encode()).hexdigest()


class Records(Sequence[Example]):
    """A TFDS data source whose examples hold plain Python values: `str` for bytes, lists for arrays."""

    def __init__(self, source: Sequence[Any]):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return {name: _python(value) for name, value in self._source[int(index) % len(self)].items()}


def _python(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return value.tolist() if hasattr(value, "tolist") else value
