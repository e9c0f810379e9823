"""Reward functions written for other trainers, unchanged: `config.rewards.NAME=trl:FILE.py:function` or `verl:...`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Reward = Callable[..., Any]


def from_trl(function: Reward) -> Reward:
    """A reward for TRL's GRPOTrainer: `function(completions, prompts=..., **columns)`, completions as text.

    Columns are the fields that all examples have, each as a list (`answer`, `id`, ...).
    """
    return _trl(function, lambda role, text: text)


def from_trl_chat(function: Reward) -> Reward:
    """The same for functions that expect chats: each completion is `[{"role": "assistant", "content": text}]`, each prompt likewise."""
    return _trl(function, lambda role, text: [{"role": role, "content": text}])


def _trl(function: Reward, wrap: Callable[[str, str], Any]) -> Reward:
    def reward(responses: list[str], *, examples: list[dict[str, Any]], **others: Any) -> Any:
        shared = set.intersection(*(set(example) for example in examples)) if examples else set()
        columns: dict[str, Any] = {
            str(name): [example[name] for example in examples] for name in shared if name != "prompt"
        }
        columns |= {
            "prompts": [wrap("user", example["prompt"]) for example in examples],
            "completions": [wrap("assistant", text) for text in responses],
        }
        return function(**_accepted(function, columns | others))

    return _named(reward, function)


def from_verl(function: Reward) -> Reward:
    """A reward for verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, a number or a dict with `score`."""

    def one(response: str, example: dict[str, Any]) -> Any:
        arguments = {
            "data_source": example.get("data_source", ""),
            "solution_str": response,
            "ground_truth": example.get("answer"),
            "extra_info": dict(example),
        }
        score = function(**_accepted(function, arguments))
        return score["score"] if isinstance(score, dict) else score

    def reward(responses: list[str], *, examples: list[dict[str, Any]], **_: Any) -> list[Any]:
        return [one(response, example) for response, example in zip(responses, examples, strict=True)]

    return _named(reward, function)


ADAPTERS = {"trl": from_trl, "trl_chat": from_trl_chat, "verl": from_verl}


def _accepted(function: Reward, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes; all of them if it takes **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _named(reward: Reward, function: Reward) -> Reward:
    reward.__name__ = getattr(function, "__name__", "reward")
    return reward
