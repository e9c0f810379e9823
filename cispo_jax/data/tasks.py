"""Generated problems: arithmetic of our own and the tasks of reasoning-gym, with training and evaluation kept apart.

Pure functions of their arguments; writing and reading them is `builders.py`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cispo_jax.config import ConfigError, suggest
from cispo_jax.rewards.scoring import ReasoningGymScorer, import_reasoning_gym

# Above so many combinations of operands, they are drawn instead of listed.
MAX_LISTED = 200_000


@dataclass(frozen=True)
class Generated:
    """Two lists without a common problem, and what was dropped on the way (`duplicates`, `unscorable`)."""

    train: list[dict[str, Any]]
    evaluation: list[dict[str, Any]]
    counts: dict[str, int]


@dataclass(frozen=True)
class ArithmeticOptions:
    """`config.data.options` of the arithmetic task."""

    operations: str = "+-"  # any of + and -
    min_value: int = 2  # operands, both ends included
    max_value: int = 20
    terms: int = 2  # operands of a problem, 2 to 4
    allow_negative: bool = False  # results, and running totals, below zero
    wording: str = "What is {expression}?"  # the prompt
    style: str = (
        "plain"  # demonstrations: plain = the equation | steps = digit by digit, or one running total a term | mixed
    )
    plain_share: float = 0.7  # with style=mixed: the share of problems whose demonstration is plain

    def __post_init__(self) -> None:
        def refuse(name: str, valid: str) -> None:
            raise ConfigError(f"config.data.options.{name}={getattr(self, name)!r} must be {valid}.")

        if not self.operations or set(self.operations) - set("+-") or len(set(self.operations)) < len(self.operations):
            refuse("operations", "+, - or +-")
        if self.min_value < 0:
            refuse("min_value", "at least 0")
        if self.max_value < self.min_value:
            refuse("max_value", f"at least config.data.options.min_value={self.min_value}")
        if not 2 <= self.terms <= 4:
            refuse("terms", "2, 3 or 4")
        if self.wording.count("{expression}") != 1:
            refuse("wording", "a text that contains {expression} once, such as 'What is {expression}?'")
        if self.style not in ("plain", "steps", "mixed"):
            refuse("style", "plain, steps or mixed")
        if not 0 <= self.plain_share <= 1:
            refuse("plain_share", "between 0 and 1")


def options_from(kind: type, options: Mapping[str, Any], task: str) -> Any:
    """A dataclass of options from a mapping; unknown names and wrong types are refused with the valid ones."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, value in options.items():
        if name not in fields:
            raise ConfigError(
                f"config.data.options.{name} is not an option of {task}.{suggest(name, fields)} "
                f"Its options: {', '.join(f'{key}={field.default!r}' for key, field in fields.items())}."
            )
        expected = type(fields[name].default)
        if type(value) is not expected and (expected, type(value)) != (float, int):
            raise ConfigError(f"config.data.options.{name}={value!r} must be of type {expected.__name__}.")
    return kind(**options)


def arithmetic(options: ArithmeticOptions, *, train_size: int, eval_size: int, seed: int) -> Generated:
    """Sums and differences; the operands of a held-out problem never meet again in training, in any order.

    Whole sets of operands are held out: if {7, 12} is, so are 7 + 12, 12 + 7 and 12 - 7. Where the range is too small
    for `train_size` different problems, there are as many as there are; at least half of all sets stay in training.

    Raises:
      ConfigError: the range is too small to hold out `eval_size` problems.
    """
    rng = random.Random(seed)
    values = range(options.min_value, options.max_value + 1)
    total = math.comb(len(values) + options.terms - 1, options.terms)
    # Small ranges: every order and operation of a set of operands is used; large ones: one of them.
    per_set = math.ceil((train_size + eval_size) / total) if total <= MAX_LISTED else 1
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    held_out = 0
    for operands in itertools.islice(_operand_sets(values, options.terms, total, rng), 100 * (train_size + eval_size)):
        split, size = (evaluation, eval_size) if len(evaluation) < eval_size else (train, train_size)
        if len(split) == size:
            break
        held_out += split is evaluation
        split += itertools.islice(_arrangements(operands, options, rng), min(per_set, size - len(split)))
    if len(evaluation) < eval_size or not train or (total <= MAX_LISTED and 2 * held_out > total):
        raise ConfigError(
            f"There are too few different problems to hold out config.data.eval_size={eval_size}: "
            f"config.data.options.min_value={options.min_value}, max_value={options.max_value}, "
            f"terms={options.terms} and operations={options.operations!r} allow {total:,} sets of operands, "
            "of which at least half are kept for training. Raise max_value or lower config.data.eval_size."
        )
    for name, problems in (("train", train), ("eval", evaluation)):
        for index, problem in enumerate(problems):
            problem["id"] = f"{name}-{index:06d}"
    assert_disjoint(train, evaluation)
    return Generated(train, evaluation, {})


def assert_disjoint(train: list[dict[str, Any]], evaluation: list[dict[str, Any]]) -> None:
    """Raises if operands of an evaluation problem occur together in a training problem, whatever their order."""
    common = {tuple(sorted(p["operands"])) for p in train} & {tuple(sorted(p["operands"])) for p in evaluation}
    if common:
        raise AssertionError(f"{len(common)} sets of operands are in training and evaluation, such as {min(common)}")


def _operand_sets(values: range, terms: int, total: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Sets of operands (with repetition), each once, in random order: all of them, or drawn where they are too many."""
    if total <= MAX_LISTED:
        listed = list(itertools.combinations_with_replacement(values, terms))
        rng.shuffle(listed)
        yield from listed
        return
    seen = set()
    while True:
        operands = tuple(sorted(rng.choices(values, k=terms)))
        if operands not in seen:
            seen.add(operands)
            yield operands


def _arrangements(
    operands: tuple[int, ...], options: ArithmeticOptions, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """The valid problems on these operands, in random order."""
    orders = sorted(set(itertools.permutations(operands)))
    choices = list(itertools.product(orders, itertools.product(options.operations, repeat=options.terms - 1)))
    rng.shuffle(choices)
    for order, signs in choices:
        signed = (n if sign == "+" else -n for sign, n in zip(("+", *signs), order, strict=True))
        totals = list(itertools.accumulate(signed))
        if options.allow_negative or min(totals) >= 0:
            yield _problem(order, signs, totals, options)


def _problem(
    operands: tuple[int, ...], signs: tuple[str, ...], totals: list[int], options: ArithmeticOptions
) -> dict[str, Any]:
    expression = " ".join([str(operands[0]), *(f"{sign} {n}" for sign, n in zip(signs, operands[1:], strict=True))])
    # By the problem itself, so that neither order nor size of the set changes a demonstration.
    by_chance = random.Random(expression).random() < options.plain_share
    if options.style == "plain" or (options.style == "mixed" and by_chance):
        response = f"{expression} = {totals[-1]}"
    elif options.terms == 2:
        response = column_steps(operands[0], signs[0], operands[1])
    else:
        steps = zip(totals[:-1], signs, operands[1:], totals[1:], strict=True)
        response = ", ".join(f"{before} {sign} {n} = {after}" for before, sign, n, after in steps)
    return {
        "prompt": options.wording.replace("{expression}", expression),
        "answer": str(totals[-1]),
        "response": response,
        "operands": list(operands),
    }


def column_steps(a: int, sign: str, b: int) -> str:
    """Written arithmetic, last digit first: `47 + 38` -> `7+8=15, 4+3+1=8, 85`; `52 - 38` -> `12-8=4, 5-3-1=1, 14`.

    A carry or borrow is the third number of the next column. `3 - 10` is worked as 10 - 3 and ends in -7.
    """
    result = a + b if sign == "+" else a - b
    high, low = (a, b) if sign == "+" else (max(a, b), min(a, b))
    steps, carry = [], 0
    for column in range(max(len(str(high)), len(str(low)))):
        x, y = high // 10**column % 10, low // 10**column % 10
        tail = f"{sign}{carry}" if carry else ""
        if sign == "+":
            value = x + y + carry
            carry = value // 10
        else:
            value = x - y - carry
            carry = int(value < 0)
            x, value = (x + 10, value + 10) if carry else (x, value)
        steps.append(f"{x}{sign}{y}{tail}={value}")
    return ", ".join([*steps, str(result)])


def reasoning_gym(task: str, options: Mapping[str, Any], *, train_size: int, eval_size: int, seed: int) -> Generated:
    """Problems of a reasoning-gym task, different by question, each checked to be scorable.

    One generator with one seed is read in order (two generators whose seeds differ by one share almost all items)
    until there are enough different questions; the first `eval_size` are held out. Dropped and counted: repeated
    questions, and items whose own answer does not get full marks after its metadata went through JSON.

    Raises:
      ConfigError: unknown task or option, too few different questions, or a task that cannot be scored from its text.
    """
    dataset = reasoning_gym_dataset(task, options, seed=seed, size=train_size + eval_size)
    scorer = ReasoningGymScorer(task, options)
    problems: dict[str, dict[str, Any]] = {}
    counts = {"duplicates": 0, "unscorable": 0}
    needed = train_size + eval_size
    started = shown = time.monotonic()
    for index in range(4 * needed + 1000):
        if len(problems) == needed or (index == 200 and not problems):
            break
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"  {task}: {len(problems):,} of {needed:,} problems, {shown - started:.0f} s", file=sys.stderr)
        try:
            item = dataset[index]
        except Exception as error:  # anything may come out of a task whose options contradict each other
            raise ConfigError(
                f"config.data.source=reasoning_gym:{task} fails to generate with {dict(options)}: {error!r}."
            ) from error
        if item["question"] in problems:
            counts["duplicates"] += 1
        elif problem := _scorable(item, scorer):
            problems[item["question"]] = problem
        else:
            counts["unscorable"] += 1
    if not problems:
        raise ConfigError(
            f"config.data.source=reasoning_gym:{task}: none of its first answers gets full marks from its own scorer "
            "given the stored text (some tasks have no reference answer, or score against data that is not text). "
            "Choose another task."
        )
    if len(problems) < min(needed, 2 * eval_size):
        raise ConfigError(
            f"config.data.source=reasoning_gym:{task} with options {dict(options)} yields only {len(problems)} "
            f"different questions, too few to hold out config.data.eval_size={eval_size} and train on as many. "
            "Widen the options or lower config.data.eval_size."
        )
    everything = list(problems.values())
    for number, problem in enumerate(everything):
        problem["id"] = f"eval-{number:06d}" if number < eval_size else f"train-{number - eval_size:06d}"
    return Generated(everything[eval_size:], everything[:eval_size], counts)


def reasoning_gym_dataset(task: str, options: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """reasoning-gym's generator, with its complaints turned into `ConfigError`s that name the setting."""
    package = import_reasoning_gym()
    tasks = package.factory.DATASETS
    if task not in tasks:
        raise ConfigError(
            f"config.data.source=reasoning_gym:{task}: there is no such task.{suggest(task, tasks)} "
            f"The {len(tasks)} tasks: {', '.join(sorted(tasks))}."
        )
    fields = {field.name: field for field in dataclasses.fields(tasks[task][1]) if field.name not in ("seed", "size")}
    for name in options:
        if name not in fields:
            what = (
                "set by config.data.seed and config.data.train_size"
                if name in ("seed", "size")
                else f"not an option of {task}"
            )
            raise ConfigError(
                f"config.data.options.{name} is {what}.{suggest(name, fields)} "
                f"Its options: {', '.join(_with_default(field) for field in fields.values())}."
            )
    try:
        return package.create_dataset(task, seed=seed, size=size, **options)
    except Exception as error:  # their checks are assertions; wrong types fail in many ways
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "its defaults"
        raise ConfigError(
            f"config.data.options of reasoning_gym:{task} ({shown}) are refused: {error or repr(error)}."
        ) from error


def _scorable(item: Mapping[str, Any], scorer: ReasoningGymScorer) -> dict[str, Any] | None:
    """The example of an item, or None if its own answer does not get full marks."""
    if not isinstance(item["answer"], str) or not item["answer"].strip():
        return None
    metadata = json.dumps(item.get("metadata", {}), default=str)
    problem = {"prompt": item["question"], "answer": item["answer"], "metadata": metadata}
    own, nonsense = scorer(
        [f"<answer>{item['answer']}</answer>", "<answer>qqqq 987654321.5</answer>"], examples=[problem] * 2
    )
    if nonsense == 1.0:
        raise ConfigError(
            f"config.data.source=reasoning_gym:{scorer.task}: its scorer gives nonsense full marks. Choose another."
        )
    return problem if own == 1.0 else None


def _with_default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.name}={field.default!r}"
    return field.name if field.default_factory is dataclasses.MISSING else f"{field.name}={field.default_factory()!r}"
