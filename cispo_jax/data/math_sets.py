"""Public sets of mathematical problems: what their files hold, field by field. The user brings the file, or names it on the hub.

`config.data.source=gsm8k:train.jsonl` or `dapo_math:hf:org/name@revision:FILE`. Every reader turns a row into `prompt`, `answer`, `id` and
what else the row holds; a row of another shape is an error that names file, row and field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cispo_jax.config import ConfigError, suggest

Row = Mapping[str, Any]

# How DAPO-Math-17k wraps each problem; taken off, so that a page's `prompt_suffix` asks the same of every set.
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) "
    "where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True)
class MathSet:
    """What a public file holds.

    Attributes:
      read: (row, where) -> fields of the example; `where` names file and row in errors.
      scorer: the reward that belongs to it, `module:function`.
      homepage, citation: of its authors.
    """

    read: Callable[[Row, str], dict[str, Any]]
    scorer: str
    homepage: str
    citation: str


def _dapo(row: Row, where: str) -> dict[str, Any]:
    turns = _field(row, "prompt", where)
    users = [t for t in turns if isinstance(t, Mapping) and t.get("role") == "user"] if isinstance(turns, list) else []
    if len(users) != 1 or not isinstance(users[0].get("content"), str):
        raise ConfigError(
            f"{where}, field 'prompt' must be a chat with one turn of the user (a list of role and content)."
        )
    text = users[0]["content"].removeprefix(DAPO_BEFORE).removesuffix(DAPO_AFTER)
    reward = _field(row, "reward_model", where)
    extra = row.get("extra_info")
    example = {"prompt": text, "answer": _field(reward, "ground_truth", where, inside="reward_model")}
    if isinstance(extra, Mapping) and extra.get("index") is not None:
        example["id"] = extra["index"]
    return example | {name: row[name] for name in ("data_source", "ability") if name in row}


def _gsm8k(row: Row, where: str) -> dict[str, Any]:
    solution = _field(row, "answer", where)
    working, mark, answer = solution.rpartition("####") if isinstance(solution, str) else ("", "", "")
    if not mark or not answer.strip():
        raise ConfigError(f"{where}, field 'answer' must end in '#### ' and the answer; it is {solution!r:.80}.")
    return {"prompt": _field(row, "question", where), "answer": answer.strip(), "solution": working.strip()}


def _math_500(row: Row, where: str) -> dict[str, Any]:
    example = {"prompt": _field(row, "problem", where), "answer": _field(row, "answer", where)}
    if row.get("unique_id") is not None:
        example["id"] = row["unique_id"]
    return example | {name: row[name] for name in ("solution", "subject", "level") if name in row}


def _aime(row: Row, where: str) -> dict[str, Any]:
    if "reward_model" in row:  # as DAPO's authors publish it
        example = _dapo(row, where)
    else:
        folded = {str(name).lower(): value for name, value in row.items()}
        prompt = "problem" if "problem" in folded else "question"
        example = {"prompt": _field(folded, prompt, where), "answer": _field(folded, "answer", where)}
        example |= {name: folded[name] for name in ("id", "solution", "url", "year") if folded.get(name) is not None}
    text = str(example["answer"]).strip()
    if not text.isascii() or not text.isdigit() or int(text) > 999:
        raise ConfigError(
            f"{where}, field 'answer' is {example['answer']!r:.40}; answers of AIME are integers from 000 to 999."
        )
    return example | {"answer": text}


def _field(row: Any, name: str, where: str, inside: str = "") -> Any:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}, field {inside!r} is {row!r:.40}, not an object with fields.")
    if row.get(name) is None:
        names = [str(key) for key in row]
        path = f"{inside}.{name}" if inside else name
        raise ConfigError(
            f"{where} has no field {path!r}.{suggest(name, names)} It has: {', '.join(names) or 'no field at all'}."
        )
    return row[name]


MATH, ANSWER_LINE = "cispo_jax.rewards.math:math_reward", "cispo_jax.rewards.math:answer_line_reward"
SETS = {
    "dapo_math": MathSet(
        _dapo,
        ANSWER_LINE,
        "https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k",
        "Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476, 2025",
    ),
    "gsm8k": MathSet(
        _gsm8k,
        MATH,
        "https://github.com/openai/grade-school-math",
        "Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv:2110.14168, 2021",
    ),
    "math_500": MathSet(
        _math_500,
        MATH,
        "https://github.com/openai/prm800k",
        "Hendrycks et al., Measuring Mathematical Problem Solving With the MATH Dataset, arXiv:2103.03874, 2021; 500 of its test problems: "
        "Lightman et al., Let's Verify Step by Step, arXiv:2305.20050, 2023",
    ),
    "aime_2024": MathSet(
        _aime,
        MATH,
        "https://maa.org/maa-invitational-competitions",
        "MAA, American Invitational Mathematics Examination, 2024",
    ),
    "aime_2025": MathSet(
        _aime,
        MATH,
        "https://maa.org/maa-invitational-competitions",
        "MAA, American Invitational Mathematics Examination, 2025",
    ),
}


def check_name(source: str, setting: str) -> None:
    """Refuses `NAME:FILE` with a name that is none of the sets."""
    name, colon, path = source.partition(":")
    if colon and name.isidentifier() and len(name) > 1 and not path.startswith("//") and name not in (*SETS, "hf"):
        raise ConfigError(
            f"{setting}={source}: there is no set {name!r}.{suggest(name, SETS)} The sets: {', '.join(f'{x}:FILE' for x in SETS)}."
        )


def split_source(source: str) -> tuple[str, str]:
    """`gsm8k:FILE` -> ("gsm8k", FILE); ("", source) for anything else."""
    name, colon, path = source.partition(":")
    return (name, path) if colon and name in SETS else ("", source)


FEATURES = ("id", "prompt", "answer", "metadata")


def as_text(example: Mapping[str, Any]) -> dict[str, str]:
    """The features of a stored example: id, prompt, answer, and the rest as JSON text."""
    rest = {name: value for name, value in example.items() if name not in FEATURES}
    return {
        **{name: str(example[name]) for name in FEATURES[:3]},
        "metadata": json.dumps(rest, default=str, ensure_ascii=False, sort_keys=True),
    }
