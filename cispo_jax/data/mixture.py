"""Several tasks in one run: `config.data.source=mixture` and a table of tasks.

    config.data.source = "mixture"
    config.data.tasks.sums = {"source": "reasoning_gym:basic_arithmetic", "weight": 2.0, "options": {...}}
    config.data.tasks.gcd = {"source": "reasoning_gym:gcd", "levels": [{"max_value": 9}, {"max_value": 99}], "advance_at": 0.8}

A task has settings of `config.data` of its own (OWN; what it does not say it takes from there) and a `Schedule`. With `levels`, each is a
table of options on top of `options`, with problems of its own in training and held out; the run begins with the first and takes the next
where `advance_at` of the responses to `window` prompts have passed. Examples carry `task`, `level` and `scorer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from cispo_jax.config import ConfigError, DataSettings, changed, suggest
from cispo_jax.data.stream import Schedule
from cispo_jax.rewards import MixedScorer
from cispo_jax.rewards.workers import name_of

OWN = (
    "source",
    "options",
    "eval_source",
    "train_size",
    "eval_size",
    "prompt_field",
    "answer_field",
    "prompt_suffix",
    "system_prompt",
)
SCHEDULE = ("weight", "levels", "advance_at", "window")


def load(settings: DataSettings, load_one: Callable[[DataSettings], Any]) -> Any:
    """The `Problems` of all tasks; `load_one` loads those of one.

    Raises:
      ConfigError: naming the setting of the task that cannot work.
    """
    if settings.source != "mixture" or not settings.tasks:
        raise ConfigError(
            f"config.data.source={settings.source} and config.data.tasks={{{', '.join(settings.tasks)}}}: a mixture needs source=mixture "
            "and a task at least, config.data.tasks.NAME.source=..."
        )
    schedules: dict[str, Schedule] = {}
    scorers: dict[str, Any] = {}
    train, evaluation, notes = [], [], []
    for name, table in settings.tasks.items():
        schedules[name], levels = _task(name, table)
        for level, own in enumerate(levels):
            sizes = {k: max(1, _size(name, own, settings, k) // len(levels)) for k in ("train_size", "eval_size")}
            of_task = changed(settings, own | sizes | {"tasks": {}, "retire_at": 0.0}, f"data.tasks.{name}")
            one = _load(name, of_task, load_one)
            scorer = f"{name}/{level}"
            scorers[scorer] = name_of(one.scorer)
            mark = {"task": name, "level": level, "scorer": scorer}
            mark |= {key: own[key] for key in ("prompt_suffix", "system_prompt") if key in own}
            train += [{**example, **mark, "id": f"{scorer}/{example['id']}"} for example in one.train]
            evaluation.append([{**example, **mark, "id": f"{scorer}/{example['id']}"} for example in one.evaluation])
            notes.append(f"  {name}: {one.description}")
    # In turn, so that the first N held-out problems hold all tasks.
    in_turn = [example for row in itertools.zip_longest(*evaluation) for example in row if example is not None]
    # Levels and tasks may overlap: what is held out in one is not trained on in another.
    held_out = {example["prompt"]: example for example in reversed(in_turn)}
    kept = [example for example in train if example["prompt"] not in held_out]
    in_turn = [example for example in in_turn if held_out[example["prompt"]] is example]
    for name, level in ((name, level) for name, schedule in schedules.items() for level in range(schedule.levels)):
        if not any((example["task"], example["level"]) == (name, level) for example in kept):
            raise ConfigError(
                f"config.data.tasks.{name}: level {level} has no problem left to train on that is not held out in another level or task."
            )
    if len(kept) < len(train):
        notes.append(
            f"  {len(train) - len(kept):,} training problems dropped because another level or task holds them out"
        )
    mixed = MixedScorer(scorers)
    notes.insert(0, f"mixture: {len(kept):,} training and {len(in_turn):,} held-out problems")
    return type(one)(kept, in_turn, mixed, mixed.verdict, "\n".join(notes), schedules)


def _task(name: str, table: Any) -> tuple[Schedule, list[dict[str, Any]]]:
    """Its schedule, and its settings at each level."""
    where = f"config.data.tasks.{name}"
    if not isinstance(table, Mapping) or "source" not in table:
        raise ConfigError(f"{where}={table!r:.60} must be a table with a source at least.")
    for key in table:
        if key not in (*OWN, *SCHEDULE):
            raise ConfigError(
                f"{where}.{key} is not a setting of a task.{suggest(key, (*OWN, *SCHEDULE))} Valid: {', '.join((*OWN, *SCHEDULE))}."
            )
    for key, valid in (
        ("weight", "a number > 0"),
        ("advance_at", "a share in (0, 1]"),
        ("window", "a number of prompts > 0"),
    ):
        value = table.get(key, 1)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not value > 0
            or (key == "advance_at" and value > 1)
        ):
            raise ConfigError(f"{where}.{key}={value!r} must be {valid}.")
    levels = table.get("levels", [{}])
    if not isinstance(levels, list) or not levels or not all(isinstance(level, Mapping) for level in levels):
        raise ConfigError(f"{where}.levels={levels!r:.60} must be a list of tables of options, the easiest first.")
    own = {key: table[key] for key in OWN if key in table}
    options = own.get("options", {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}.options={options!r:.60} must be a table of options.")
    schedule = Schedule(
        weight=float(table.get("weight", 1.0)),
        levels=len(levels),
        advance_at=float(table.get("advance_at", 1.0)),
        window=int(table.get("window", 64)),
    )
    return schedule, [own | {"options": {**options, **level}} for level in levels]


def _size(name: str, own: Mapping[str, Any], settings: DataSettings, key: str) -> int:
    value = own.get(key, getattr(settings, key))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.data.tasks.{name}.{key}={value!r} must be an integer > 0.")
    return value


def _load(name: str, settings: DataSettings, load_one: Callable[[DataSettings], Any]) -> Any:
    if settings.source == "mixture":
        raise ConfigError(f"config.data.tasks.{name}.source=mixture: a task of a mixture is no mixture.")
    try:
        return load_one(settings)
    except ConfigError as error:  # which speaks of config.data
        raise ConfigError(f"config.data.tasks.{name}: {error}") from None
