"""Which values a setting may have, and which settings cannot stand together."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from cispo_jax.config.settings import Config, ConfigError, ObjectiveSettings, ProfileSettings, suggest

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": ("full", "attention", "off"),
    "model.attention": ("auto", "blocks", "splash", "cudnn"),
    "data.long_prompts": ("refuse", "filter"),
    "rewards.task": ("auto", "on", "off"),
    "objective.aggregation": ("token", "prompt", "sequence", "constant"),
    "objective.anchor": ("old", "rollout"),
    "objective.kl_estimator": ("k1", "k2", "k3"),
    "objective.advantage": ("group", "rloo"),
    "objective.advantage_scale": ("group", "batch", "none"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "optimizer.warmup_unit": ("rollout_steps", "updates"),
}
MINIMUM: dict[str, float] = {
    "seed": 0,
    "num_steps": 0,
    "mesh.sampling.expert": 0,
    "mesh.sampling.tensor": 0,
    "data.train_size": 1,
    "data.eval_size": 1,
    "data.max_prompt_tokens": 1,
    "rewards.workers": 0,
    "rewards.overlong_buffer": 0,
    "sampling.prompts_per_step": 1,
    "sampling.group_size": 2,
    "sampling.max_new_tokens": 1,
    "sampling.max_refills": 0,
    "sampling.slots": 0,
    "sampling.sync_tokens": 1,
    "sampling.repetition_stop": 0,
    "objective.num_minibatches": 1,
    "objective.num_epochs": 1,
    "objective.micro_batch_tokens": 0,
    "objective.load_balance": 0,
    "objective.router_z": 0,
    "objective.kl": 0,
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
TINY = 1e-37  # below it float32 has no ordinary numbers
MAY_BE_INFINITE = ("optimizer.max_grad_norm",)
MAX_WORKERS = 1024
WHY = {
    "sampling.group_size": "the advantage compares the responses of a prompt with each other",
    "sampling.temperature": "temperature 0 is greedy and is for evaluation; its probabilities are not those of a policy",
}


def validate(config: Config) -> None:
    """Raises a `ConfigError` for the first setting that cannot work, before any device work."""
    for name, choices in CHOICES.items():
        value = _get(config, name)
        if value not in choices and not (value is None and name == "objective.aggregation"):
            raise ConfigError(
                f"config.{name}={value!r}: valid values are {', '.join(choices)}.{suggest(str(value), choices)}"
            )
    for name, least in MINIMUM.items():
        if not _get(config, name) >= least or (math.isinf(_get(config, name)) and name not in MAY_BE_INFINITE):
            reason = f" ({WHY[name]})" if name in WHY else ""
            raise ConfigError(f"config.{name}={_get(config, name)}: must be at least {least}{reason}.")
    for name in POSITIVE:
        value = _get(config, name)
        if not (value > TINY and math.isfinite(value)):
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
    if config.rewards.workers > MAX_WORKERS:
        raise ConfigError(
            f"config.rewards.workers={config.rewards.workers}: valid values are 0 to {MAX_WORKERS} processes."
        )
    if config.logging.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"config.logging.wandb={config.logging.wandb!r} needs the wandb package: pip install wandb")
    if not 0 <= config.data.retire_at <= 1:
        raise ConfigError(f"config.data.retire_at={config.data.retire_at}: valid values are 0 (off) to 1.")
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
    for start, limit in sampling.length_schedule.items():
        if not start.isdigit() or isinstance(limit, bool) or not isinstance(limit, int):
            raise ConfigError(
                f"config.sampling.length_schedule.{start}={limit!r}: a rollout step and a number of tokens, e.g. 500=80_000."
            )
        least = max(1, config.rewards.overlong_buffer)
        if not least <= limit <= sampling.max_new_tokens:
            raise ConfigError(
                f"config.sampling.length_schedule.{start}={limit}: valid values are {least} to config.sampling.max_new_tokens="
                f"{sampling.max_new_tokens}."
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
