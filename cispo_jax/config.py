"""Every setting of a run, once, with its unit: the frozen dataclasses that a config page turns into.

A config page (`configs/*.py`) returns an `ml_collections.ConfigDict` made by `default_config()` and changed by the page and by
`--config.section.key=value`. The launcher calls `from_config_dict` once; below it nobody sees a `ConfigDict`. Every problem is a
`ConfigError` that names the setting, its value and the valid values, raised before any device work; the launcher exits with code 2.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """Bad settings or bad input from a user: shown as one paragraph without a traceback, exit code 2."""


@dataclass(frozen=True)
class ModelSettings:
    preset: str = (
        "smollm2-135m"  # architecture (cispo_jax.models.PRESETS); weights that bring their own architecture override it
    )
    weights: str = ""  # "" = random; a directory, a .gguf file, package:NAME (a .gguf inside an installed package)
    tokenizer: str = ""  # "" = the weights' own; characters:ABC = one token a character; path of a tokenizer.json
    dtype: str = "float32"  # compute dtype: float32 | bfloat16; parameters, optimizer, head and softmax stay float32
    remat: bool = True  # recompute each layer in the backward pass: memory for about a third more compute


@dataclass(frozen=True)
class MeshSettings:
    data: int = 1  # devices that split the batch and replicate the parameters; -1 = what is left
    fsdp: int = -1  # devices that split the batch and the parameters
    expert: int = 1  # devices that split the experts (and the batch outside them)
    tensor: int = 1  # devices that split heads, feed-forward and vocabulary


@dataclass(frozen=True)
class DataSettings:
    source: str = "arithmetic"  # arithmetic | reasoning_gym:TASK | a .jsonl or .parquet file with `prompt` and `answer`
    options: Mapping[str, Any] = field(default_factory=dict)  # the generator's own settings, e.g. max_value
    eval_source: str = ""  # "" = held out from `source`; else a file of evaluation problems
    train_size: int = 4096  # problems to generate for training; a file is used whole
    eval_size: int = 256  # held-out problems
    seed: int = 0  # of the generator (the run's `seed` orders and samples)
    directory: str = ""  # where generated TFDS data sets are kept; "" = TFDS's own default
    template: str = "chat"  # chat = the tokenizer's chat template | raw = the prompt as it is | path of a .jinja file
    system_prompt: str = ""  # "" = no system turn
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # handed to the template
    prompt_suffix: str = ""  # added to every problem before templating, e.g. an instruction
    prompt_field: str = "prompt"  # column names of a file
    answer_field: str = "answer"
    max_prompt_tokens: int = 256  # after templating
    long_prompts: str = "refuse"  # what to do with longer ones: refuse | filter (counted in the log)


@dataclass(frozen=True)
class RewardSettings:
    """Free names: `--config.rewards.NAME=module_or_file:function` adds a reward function; the total is the sum over all of them."""

    functions: Mapping[str, str] = field(default_factory=dict)  # NAME -> module_or_file:function
    task: str = "auto"  # the data set's own scorer: auto = only if no function is named | on | off
    workers: int = 0  # processes that score; 0 = inline
    overlong_buffer: int = 0  # tokens before max_new_tokens where DAPO's soft penalty grows; 0 = off
    overlong_penalty: float = 1.0  # subtracted in full at the limit


@dataclass(frozen=True)
class SamplingSettings:
    prompts_per_step: int = 16  # P: prompts of one rollout batch
    group_size: int = 8  # G: responses of each prompt
    max_new_tokens: int = 64  # T: response tokens, the EOS included
    temperature: float = 1.0
    top_p: float = 1.0  # must be 1 in training (the ratio would be biased)
    top_k: int = 0  # 0 = off; must be 0 in training
    dynamic: bool = True  # leave out groups whose rewards are all equal (DAPO's dynamic sampling)
    max_refills: int = 0  # further batches of prompts to replace groups that were left out
    shuffle_rewards: bool = False  # control experiment: permute the rewards within the batch; nothing can be learned


@dataclass(frozen=True)
class ObjectiveSettings:
    name: str = "cispo"  # cispo | reinforce | ppo | grpo | dapo | gspo | unified | module_or_file:function
    epsilon_low: float | None = None  # lower bound of the ratio is 1 - epsilon_low; None = the objective's own default
    epsilon_high: float | None = None  # upper bound is 1 + epsilon_high; None = the objective's own default
    mask_epsilon_low: float | None = None  # unified only (Eq. 5): the mask's own range
    mask_epsilon_high: float | None = None
    aggregation: str | None = None  # token | prompt | sequence | constant; None = the objective's own default
    num_minibatches: int = 16  # a rollout batch is split into so many mini-batches of whole groups ...
    num_epochs: int = 1  # ... and passed over so many times: updates a step = num_minibatches x num_epochs
    micro_batch_rows: int = 0  # rows of one forward and backward pass; 0 = the whole mini-batch
    anchor: str = (
        "old"  # denominator of the ratio: old = a forward pass of the trainer | rollout = the sampler's record
    )
    advantage: str = "group"  # group (mean of the group) | rloo (mean of the others)
    advantage_scale: str = "group"  # divide by the standard deviation of the group | batch | none
    train_truncated: bool = True  # False: responses that hit max_new_tokens leave the loss
    truncated_importance_cap: float | None = None  # multiply by min(old / rollout, cap); refused with anchor=rollout


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float = 1e-6  # peak
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-15  # MiniMax-M1; use 1e-8 where a parameter's true gradient is zero
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # global norm; 0 = no clipping
    schedule: str = "constant"  # after the warm-up: constant | linear | cosine (both to 0 at the end of the run)
    warmup: int = 0  # length of the linear warm-up in units of ...
    warmup_unit: str = "rollout_steps"  # ... rollout_steps | updates


@dataclass(frozen=True)
class SftSettings:
    num_steps: int = 0  # supervised updates before RL; 0 = no warm start
    batch_size: int = 64  # demonstrations an update
    learning_rate: float = 1e-3  # peak; 5 % warm-up, then cosine to 0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EvaluationSettings:
    every: int = 5  # rollout steps between evaluations; 0 = only before and after
    num_problems: int = 256  # of the held-out set; 0 = all
    samples: int = 0  # k of avg@k, sampled at `temperature`; 0 = greedy only
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_rows: int = 128  # responses decoded at a time


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = 5  # rollout steps; the last step is always saved
    keep: int = 2  # newest checkpoints kept


@dataclass(frozen=True)
class LoggingSettings:
    tensorboard: bool = True
    wandb: str = ""  # project name; "" = off
    samples: int = 0  # responses of a step written to rollouts/; 0 = all


@dataclass(frozen=True)
class ProfileSettings:
    steps: str = ""  # "3:5" = trace rollout steps 3 and 4 into WORKDIR/profile


@dataclass(frozen=True)
class Config:
    seed: int = 0  # order of the prompts, sampled tokens, random weights
    num_steps: int = 10  # rollout steps
    model: ModelSettings = field(default_factory=ModelSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    data: DataSettings = field(default_factory=DataSettings)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)


CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "data.long_prompts": ("refuse", "filter"),
    "rewards.task": ("auto", "on", "off"),
    "objective.aggregation": ("token", "prompt", "sequence", "constant"),
    "objective.anchor": ("old", "rollout"),
    "objective.advantage": ("group", "rloo"),
    "objective.advantage_scale": ("group", "batch", "none"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "optimizer.warmup_unit": ("rollout_steps", "updates"),
}
MINIMUM: dict[str, float] = {
    "seed": 0,
    "num_steps": 0,
    "data.train_size": 1,
    "data.eval_size": 1,
    "data.max_prompt_tokens": 1,
    "rewards.workers": 0,
    "rewards.overlong_buffer": 0,
    "sampling.prompts_per_step": 1,
    "sampling.group_size": 2,
    "sampling.max_new_tokens": 1,
    "sampling.max_refills": 0,
    "objective.num_minibatches": 1,
    "objective.num_epochs": 1,
    "objective.micro_batch_rows": 0,
    "optimizer.warmup": 0,
    "optimizer.max_grad_norm": 0,
    "optimizer.weight_decay": 0,
    "sft.num_steps": 0,
    "sft.batch_size": 1,
    "sft.weight_decay": 0,
    "evaluation.every": 0,
    "evaluation.num_problems": 0,
    "evaluation.samples": 0,
    "evaluation.temperature": 0,
    "evaluation.top_k": 0,
    "evaluation.batch_rows": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "logging.samples": 0,
}
POSITIVE = ("sampling.temperature", "optimizer.learning_rate", "optimizer.eps", "sft.learning_rate")
WHY = {
    "sampling.group_size": "the advantage compares the responses of a prompt with each other",
    "sampling.temperature": "temperature 0 is greedy and is for evaluation; its probabilities are not those of a policy",
}


def default_config() -> Any:
    """An unlocked `ConfigDict` with every setting at its default, for a config page to change."""
    from ml_collections import config_dict

    def convert(cls: type) -> Any:
        section = config_dict.ConfigDict()
        hints = typing.get_type_hints(cls)
        for name, spec in ((f.name, f) for f in dataclasses.fields(cls)):
            if cls is RewardSettings and name == "functions":
                continue  # free names: each one is a key of its own
            if dataclasses.is_dataclass(hints[name]):
                section[name] = convert(hints[name])
            elif spec.default is None:
                section[name] = config_dict.placeholder(_optional(hints[name]))
            elif spec.default is dataclasses.MISSING:
                section[name] = config_dict.ConfigDict()
            else:
                section[name] = spec.default
        return section

    return convert(Config)


def from_config_dict(config: Mapping[str, Any] | Config) -> Config:
    """The frozen `Config` of a page's `ConfigDict`; refuses unknown keys, wrong types and values that cannot work together."""
    if isinstance(config, Config):
        settings = config
    else:
        plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        settings = _build(Config, plain, "")
    validate(settings)
    return settings


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, for `config.json`; `from_config_dict` reads them back."""
    values = dataclasses.asdict(config)
    values["rewards"] |= values["rewards"].pop("functions")
    return values


def set_from_text(page: dict[str, Any], name: str, text: str) -> None:
    """Sets `name` ("section.key") in a page's nested dicts from the text of a flag, read as the setting's type."""
    *sections, key = name.split(".")
    hint: Any = Config
    path = ""
    for section in sections:
        if not dataclasses.is_dataclass(hint):
            raise ConfigError(f"config.{path[:-1]} is a value, not a section: config.{name} does not exist.")
        hints = typing.get_type_hints(hint)
        if section not in hints:
            raise ConfigError(_unknown(section, path, list(hints)))
        hint, page, path = hints[section], page.setdefault(section, {}), f"{path}{section}."
    if typing.get_origin(hint) is Mapping:  # a table of free keys
        page[key] = _literal(text)
        return
    if not dataclasses.is_dataclass(hint):
        raise ConfigError(f"config.{path[:-1]} is a value, not a section: config.{name} does not exist.")
    hints = typing.get_type_hints(hint)
    if hint is RewardSettings and (key not in hints or key == "functions"):
        page[key] = text
    elif key not in hints:
        raise ConfigError(_unknown(key, path, list(hints)))
    else:
        kind = _optional(hints[key])
        value: Any = text if kind is str and not (kind is not hints[key] and text in ("None", "")) else _literal(text)
        if kind is bool and text.lower() in ("true", "false"):
            value = text.lower() == "true"
        page[key] = _convert(hints[key], value, name)


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def suggest(name: str, valid: typing.Iterable[str]) -> str:
    """' Did you mean "x"?' for the closest valid name, or nothing."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


def validate(config: Config) -> None:
    """Raises a `ConfigError` for the first setting that cannot work, before any device work."""
    for name, choices in CHOICES.items():
        value = _get(config, name)
        if value not in choices and not (value is None and name == "objective.aggregation"):
            raise ConfigError(
                f"config.{name}={value!r}: valid values are {', '.join(choices)}.{suggest(str(value), choices)}"
            )
    for name, least in MINIMUM.items():
        if not _get(config, name) >= least:
            reason = f" ({WHY[name]})" if name in WHY else ""
            raise ConfigError(f"config.{name}={_get(config, name)}: must be at least {least}{reason}.")
    for name in POSITIVE:
        value = _get(config, name)
        if not (value > 0 and math.isfinite(value)):
            reason = f" ({WHY[name]})" if name in WHY else ""
            raise ConfigError(f"config.{name}={value}: must be a finite number above 0{reason}.")
    _validate_sampling(config)
    _validate_objective(config.objective)
    for name in ("b1", "b2"):
        if not 0 <= getattr(config.optimizer, name) < 1:
            raise ConfigError(
                f"config.optimizer.{name}={getattr(config.optimizer, name)}: valid values are 0 <= {name} < 1."
            )
    if not 0 < config.evaluation.top_p <= 1:
        raise ConfigError(f"config.evaluation.top_p={config.evaluation.top_p}: valid values are 0 < top_p <= 1.")
    if config.evaluation.samples and config.evaluation.temperature == 0:
        raise ConfigError(
            "config.evaluation.temperature=0 with evaluation.samples > 0: avg@k needs samples; use a temperature > 0."
        )
    profile_steps(config.profile)


def profile_steps(settings: ProfileSettings) -> range:
    """The rollout steps to trace, from "first:last" (last excluded)."""
    if not settings.steps:
        return range(0)
    try:
        first, last = (int(part) for part in settings.steps.split(":"))
        if not 0 < first < last:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"config.profile.steps={settings.steps!r}: write FIRST:LAST, e.g. 3:5 for rollout steps 3 and 4 (steps count from 1)."
        ) from None
    return range(first, last)


def _validate_sampling(config: Config) -> None:
    sampling, objective = config.sampling, config.objective
    if sampling.top_p != 1 or sampling.top_k != 0:
        raise ConfigError(
            f"config.sampling.top_p={sampling.top_p}, config.sampling.top_k={sampling.top_k}: training samples from the whole "
            "distribution (top_p=1, top_k=0), otherwise the recorded probabilities are not those of the policy and the ratio is "
            "biased. Use config.evaluation.top_p and top_k for evaluation."
        )
    if sampling.prompts_per_step % objective.num_minibatches:
        divisors = [n for n in range(1, sampling.prompts_per_step + 1) if sampling.prompts_per_step % n == 0]
        raise ConfigError(
            f"config.sampling.prompts_per_step={sampling.prompts_per_step} is not a multiple of "
            f"config.objective.num_minibatches={objective.num_minibatches}: a mini-batch holds whole groups. Valid numbers of "
            f"mini-batches for {sampling.prompts_per_step} prompts: {', '.join(map(str, divisors))}."
        )
    rows = sampling.prompts_per_step // objective.num_minibatches * sampling.group_size
    if objective.micro_batch_rows and rows % objective.micro_batch_rows:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        raise ConfigError(
            f"config.objective.micro_batch_rows={objective.micro_batch_rows} does not divide the {rows} rows of a mini-batch "
            f"(prompts_per_step / num_minibatches x group_size). Valid: 0 (all) or {', '.join(map(str, divisors))}."
        )
    if config.rewards.overlong_buffer > sampling.max_new_tokens:
        raise ConfigError(
            f"config.rewards.overlong_buffer={config.rewards.overlong_buffer} tokens is more than "
            f"config.sampling.max_new_tokens={sampling.max_new_tokens}: valid values are 0 (off) to {sampling.max_new_tokens}."
        )


def _validate_objective(objective: ObjectiveSettings) -> None:
    for name in ("epsilon_high", "mask_epsilon_high"):
        value = getattr(objective, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"config.objective.{name}={value}: an upper epsilon must be above 0; it is an offset, the bound is 1 + {name} "
                "(an absolute cap c of other libraries is epsilon_high = c - 1)."
            )
    for name in ("epsilon_low", "mask_epsilon_low"):
        value = getattr(objective, name)
        if value is not None and not value >= 0:
            raise ConfigError(
                f"config.objective.{name}={value}: the lower bound is 1 - {name}; valid: 0 or more, 1 or more = off."
            )
    for name in ("mask_epsilon_low", "mask_epsilon_high"):
        value = getattr(objective, name)
        if value is not None and objective.name != "unified":
            raise ConfigError(
                f"config.objective.{name}={value} belongs to config.objective.name=unified (Eq. 5), not to "
                f"{objective.name!r}; leave it out."
            )
    cap = objective.truncated_importance_cap
    if cap is not None and not cap > 0:
        raise ConfigError(f"config.objective.truncated_importance_cap={cap}: must be above 0; leave it out for none.")
    if cap is not None and objective.anchor == "rollout":
        raise ConfigError(
            "config.objective.truncated_importance_cap with config.objective.anchor=rollout: the ratio already holds the "
            "sampler's mismatch and would count it twice. Use anchor=old, or leave the cap out."
        )


def _get(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _optional(hint: Any) -> type:
    """The type inside `T | None`, or the type itself."""
    inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return inner[0] if type(None) in typing.get_args(hint) else hint


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
    """A settings dataclass from nested plain values."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    if cls is RewardSettings:
        names.remove("functions")
        free = {key: value for key, value in values.items() if key not in names}
        for key, value in free.items():
            if not isinstance(value, str) or ":" not in value:
                raise ConfigError(
                    f"config.rewards.{key}={value!r}: a reward of your own is written module_or_file:function, e.g. "
                    f"my_reward.py:reward; the settings are {', '.join(names)}.{suggest(key, names)}"
                )
        known = {key: _convert(hints[key], values[key], f"{path}{key}") for key in names if key in values}
        return cls(functions=free, **known)
    for key in values:
        if key not in names:
            raise ConfigError(_unknown(key, path, names))
    return cls(**{key: _convert(hints[key], value, f"{path}{key}") for key, value in values.items()})


def _unknown(key: str, path: str, names: list[str]) -> str:
    """One sentence for an unknown key, with its section's keys, the nearest one, and the sections where that name does exist."""
    sections = {f.name: typing.get_type_hints(Config)[f.name] for f in dataclasses.fields(Config)}
    elsewhere = [
        f"config.{section}.{key}"
        for section, cls in sections.items()
        if dataclasses.is_dataclass(cls) and key in {f.name for f in dataclasses.fields(cls)}
    ]
    where = f"section config.{path[:-1]}" if path else "the top level of the config"
    hint = f" It exists as {' and '.join(elsewhere)}." if elsewhere else suggest(key, names)
    return f"config.{path}{key}: unknown setting in {where}.{hint} Valid there: {', '.join(names)}."


def _plain(value: Any) -> Any:
    """Tables as dicts and sequences as lists, so that a page, a frozen page and config.json give equal settings."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.{path}={value!r}: this is a section of settings, not a value.")
        return _build(typing.cast(type, hint), value, f"{path}.")
    if typing.get_origin(hint) is not None and typing.get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.{path}={value!r}: must be a table, e.g. config.{path}.NAME=VALUE.")
        return _plain(value)
    kind = _optional(hint)
    if value is None and kind is not hint:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"config.{path}={value!r}: must be of type {kind.__name__}, not {type(value).__name__}.")
    return value
