"""From settings to the functions and values a run is made of: tokenizer, problems, rewards, model, mesh, objective, sampler.

The loops (`trainer.py`, `evaluation.py`) know none of the packages imported here; they get functions.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cispo_jax import data, models, objectives, rewards, sharding, weights
from cispo_jax.config import Config, ConfigError, ObjectiveSettings, suggest
from cispo_jax.data import tokenizers
from cispo_jax.log_probs import fused_token_log_probs
from cispo_jax.sampling import sample_groups
from cispo_jax.training.optimizer import make_optimizer
from cispo_jax.training.sft import warm_start
from cispo_jax.training.train_step import init_state, make_score_step, make_train_step
from cispo_jax.types import Rollout, TrainState

OBJECTIVES: dict[str, Callable] = {
    name: getattr(objectives, f"{name}_loss")
    for name in ("cispo", "reinforce", "ppo", "grpo", "dapo", "gspo", "unified")
}


@dataclass
class Run:
    """Everything a loop calls. Built once; nothing here changes while the run goes on."""

    config: Config
    tokenizer: tokenizers.Tokenizer
    problems: data.Problems
    stream: data.PromptStream  # the endless, shuffled order of the training problems
    encode: Callable[[dict[str, Any]], list[int]]
    score: rewards.Scorer
    sample: Callable[..., Rollout]
    mesh: Mesh
    optimizer: Any
    make_model: Callable[[], Any]
    abstract_state: TrainState
    shardings: TrainState
    log_probs_fn: Callable
    train_step: Callable
    score_step: Callable
    to_sampling: Callable[[Any], Any]
    shard_rows: Callable[[np.ndarray], jax.Array]
    prompt_width: int
    notes: list[str]

    def init_state(self, model: Any) -> TrainState:
        """The optimizer state of `model`, sharded from birth; the model is donated."""
        return jax.jit(lambda m: init_state(m, self.optimizer), out_shardings=self.shardings, donate_argnums=0)(model)

    def warm_start(self, model: Any, report: Callable[[int, float], None]) -> Any:
        """Supervised updates on the problems' demonstrations; `report(update, loss)` after each. The model is donated."""
        settings = self.config.sft
        updates = warm_start(
            model,
            _demonstrations(self),
            settings,
            log_probs_fn=self.log_probs_fn,
            prompt_width=self.prompt_width,
            response_width=self.config.sampling.max_new_tokens,
            shardings=self.shardings,
            shard_rows=self.shard_rows,
        )
        for update, model, loss in updates:
            report(update, loss)
        return model


def build(
    config: Config,
    *,
    dataset: Any = None,
    reward: Callable | None = None,
    objective: Callable | None = None,
    model: Any = None,
    sample_fn: Callable | None = None,
) -> Run:
    """Puts a run together; every user error is raised here, before anything is compiled. Arguments: see `trainer.train`."""
    notes: list[str] = []
    loss_fn, aggregation, cap = resolve_objective(config.objective, objective, notes)
    if config.model.preset not in models.PRESETS and not config.model.weights and model is None:
        raise ConfigError(
            f"config.model.preset={config.model.preset!r}: valid values are {', '.join(models.PRESETS)}."
            + suggest(config.model.preset, models.PRESETS)
        )
    tokenizer = _tokenizer(config)
    problems = data.load(config.data) if dataset is None else data.from_examples(dataset, config.data)
    notes.append(problems.description)
    prompter = data.Prompter(config.data, tokenizer)
    problems = dataclasses.replace(
        problems, train=prompter.check(problems.train), evaluation=prompter.check(problems.evaluation)
    )
    width = max(len(prompter.encode(e)) for part in (problems.train, problems.evaluation) for e in part)
    score = _scorer(config, problems, reward)
    if config.sft.num_steps:
        _check_demonstrations(config, problems, tokenizer)

    mesh = sharding.make_mesh(config.mesh)
    _check_rows(config, sharding.batch_devices(mesh))
    architecture = _architecture(config, tokenizer, model)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ConfigError(
            f"config.model.tokenizer={config.model.tokenizer or config.model.weights!r} has {tokenizer.vocab_size:,} tokens, the "
            f"model only {architecture.vocab_size:,}: they do not belong together."
        )
    if 2 * tokenizer.vocab_size < architecture.vocab_size:
        notes.append(
            f"warning: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {architecture.vocab_size:,}; is "
            f"config.model.tokenizer={config.model.tokenizer!r} the model's own?"
        )
    key = jax.random.key(config.seed)
    optimizer = make_optimizer(config.optimizer)
    abstract = jax.eval_shape(lambda: init_state(models.Transformer(architecture, key=key), optimizer))
    shardings = sharding.state_shardings(abstract, mesh)
    sharding.check_divisible(abstract.model, shardings.model, mesh)

    def make_model():
        if model is not None:
            return jax.device_put(model, shardings.model)
        if config.model.weights:
            return weights.load_pretrained(config.model.weights, mesh=mesh)[0]
        return jax.jit(lambda: models.Transformer(architecture, key=key), out_shardings=shardings.model)()

    dtype = jnp.dtype(config.model.dtype)
    rows_sharding = sharding.batch_sharding(mesh)
    whole = sharding.replicated(mesh)
    shard_rows = lambda x: jax.device_put(x, whole if len(x) % sharding.batch_devices(mesh) else rows_sharding)
    limit = weights.context_length(config.model.weights) if config.model.weights else None
    if limit is not None and width + config.sampling.max_new_tokens > limit:
        raise ConfigError(
            f"config.sampling.max_new_tokens={config.sampling.max_new_tokens} and prompts of up to {width} tokens are more than the "
            f"{limit} tokens that the model was made for: valid are 1 to {limit - width}."
        )

    sampler = sample_groups if sample_fn is None else sample_fn
    layout = {
        "prompt_width": width,
        "max_tokens": limit,
        "pad_id": tokenizer.pad_id,
        "dtype": dtype,
        "shard_rows": shard_rows,
    }

    def sample(model, prompts, **options):
        common = {"max_new_tokens": config.sampling.max_new_tokens, "eos_ids": tokenizer.eos_ids}
        return sampler(model, prompts, **_accepted(sampler, layout | options) | common)

    def log_probs_fn(model, tokens_BX, padding_mask_BX, *, response_width, share):
        """Log-probs and entropy of the response tokens: the same layers, head and temperature as the sampler's."""
        options = {"response_width": response_width, "share": share, "dtype": dtype, "remat": config.model.remat}
        hidden_BTD = models.response_states(model, tokens_BX, padding_mask_BX, **options)
        tokens_BT = tokens_BX[:, -response_width:]
        return fused_token_log_probs(
            hidden_BTD, models.head_matrix(model), tokens_BT, temperature=config.sampling.temperature
        )

    rows = config.sampling.prompts_per_step * config.sampling.group_size // config.objective.num_minibatches
    return Run(
        config=config,
        tokenizer=tokenizer,
        problems=problems,
        stream=data.PromptStream(problems.train, config.seed),
        encode=prompter.encode,
        score=score,
        sample=sample,
        mesh=mesh,
        optimizer=optimizer,
        make_model=make_model,
        abstract_state=abstract,
        shardings=shardings,
        log_probs_fn=log_probs_fn,
        train_step=make_train_step(
            log_probs_fn,
            loss_fn,
            optimizer,
            aggregation=aggregation,
            normalizer=float(rows * config.sampling.max_new_tokens) if aggregation == "constant" else None,
            group_size=config.sampling.group_size,
            micro_batch_rows=config.objective.micro_batch_rows,
            importance_cap=config.objective.truncated_importance_cap,
            epsilon_high=cap,
            shardings=shardings,
        ),
        score_step=make_score_step(
            log_probs_fn, group_size=config.sampling.group_size, micro_batch_rows=config.objective.micro_batch_rows
        ),
        to_sampling=_sampling_layout(abstract.model, mesh, dtype),
        shard_rows=shard_rows,
        prompt_width=width,
        notes=notes,
    )


def resolve_objective(
    settings: ObjectiveSettings, function: Callable | None, notes: list[str]
) -> tuple[Callable, str, float]:
    """The loss with its epsilons bound, the aggregation, and the upper epsilon that `clip/at_cap` reports on."""
    name = settings.name
    if function is None and ":" in name:
        function = rewards.load_function(name, "config.objective.name")
    if function is None and name not in OBJECTIVES:
        raise ConfigError(
            f"config.objective.name={name!r}: valid values are {', '.join(OBJECTIVES)}, or module_or_file:function for your own."
            + suggest(name, OBJECTIVES)
        )
    loss_fn = OBJECTIVES[name] if function is None else function
    parameters = inspect.signature(loss_fn).parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "aggregation" not in parameters and not any_keyword:
        raise ConfigError(
            f"config.objective.name={name}: the function must have the signature of cispo_jax.cispo_loss; it has no `aggregation`."
        )
    high = parameters["epsilon_high"].default if "epsilon_high" in parameters else 4.0
    cap = float(settings.epsilon_high or (high if isinstance(high, int | float) else 4.0))
    if function is None and name == "unified":
        bound: dict[str, Any] = {
            "weight_clip": (settings.epsilon_low, cap),
            "mask_clip": (settings.mask_epsilon_low, settings.mask_epsilon_high),
        }
    else:
        chosen = {"epsilon_low": settings.epsilon_low, "epsilon_high": settings.epsilon_high}
        bound = {key: value for key, value in chosen.items() if value is not None}
        unknown = [] if any_keyword else [key for key in bound if key not in parameters]
        if unknown:
            raise ConfigError(
                f"config.objective.{unknown[0]}={bound[unknown[0]]}: the objective {name!r} has no such bound; leave it out."
            )
    if settings.epsilon_low is not None and settings.epsilon_low < 1 and name in ("cispo", "unified"):
        notes.append(
            f"warning: config.objective.epsilon_low={settings.epsilon_low} puts a floor of {1 - settings.epsilon_low:g} under the weight: "
            "tokens that the policy has left keep being pushed. MiniMax-M1 and ScaleRL use no lower bound (epsilon_low=None)."
        )
    default = parameters["aggregation"].default if "aggregation" in parameters else "token"
    aggregation = settings.aggregation or (
        default if default in objectives.AGGREGATIONS and default != "none" else "token"
    )
    bind = (lambda *arrays, **options: loss_fn(*arrays, **bound, **options)) if bound else loss_fn
    if function is not None:
        _check_objective(name, bind, settings, notes)
    return bind, aggregation, cap


def _check_objective(name: str, loss_fn: Callable, settings: ObjectiveSettings, notes: list[str]) -> None:
    """A trial of a user's objective on tiny arrays: it must return (loss, metrics), be differentiable under `jit`, and should be
    sum(coefficient x term)."""
    log_probs = -jnp.linspace(0.5, 2.0, 6).reshape(2, 3)  # not square: a missing axis must not pass
    arrays = (log_probs, log_probs - 0.1, jnp.array([1.0, -1.0]), jnp.ones((2, 3), bool))

    def loss_of(*arrays):
        loss, metrics = loss_fn(*arrays[:-1], aggregation=arrays[-1])
        return loss, dict(metrics)

    try:
        trial = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        values = [float(trial(*arrays, jnp.full((2, 3), c))[0][0]) for c in (0.25, 0.5)]
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"config.objective.name={name}: a trial call failed with {type(error).__name__}: {error}. The signature is that of "
            "cispo_jax.cispo_loss; `aggregation` arrives as a [B, T] array of coefficients, the result is (loss, metrics); it runs "
            "inside jax.jit, so `if` and float() cannot depend on the arrays."
        ) from error
    if not np.isfinite(values).all():
        raise ConfigError(
            f"config.objective.name={name}: on a trial batch without anything unusual the loss is {values[0]}."
        )
    if not np.isclose(values[1], 2 * values[0], rtol=1e-4, atol=1e-6):
        message = (
            f"the objective {name} does not use the array of coefficients handed to it as `aggregation` (its loss is not "
            "sum(coefficient x term)), so it reduces as it likes"
        )
        if settings.micro_batch_rows:
            raise ConfigError(
                f"config.objective.micro_batch_rows={settings.micro_batch_rows}: {message}; micro-batches would not add up."
            )
        notes.append(f"warning: {message}; config.objective.aggregation has no effect.")


def _accepted(function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that the function takes: a user's sampler need not know our layout."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _tokenizer(config: Config) -> tokenizers.Tokenizer:
    source = config.model.tokenizer or config.model.weights
    if source:
        return weights.load_tokenizer(source)
    raise ConfigError(
        "config.model.tokenizer is empty and config.model.weights brings none: set characters:ABC... (one token a character) or the "
        "path of a tokenizer.json."
    )


def _architecture(config: Config, tokenizer: tokenizers.Tokenizer, model: Any) -> models.TransformerConfig:
    if model is not None:
        return model.config
    if config.model.weights:
        return weights.load_config(config.model.weights)
    return dataclasses.replace(models.PRESETS[config.model.preset], vocab_size=tokenizer.vocab_size)


def _scorer(config: Config, problems: Any, reward: Callable | None) -> rewards.Scorer:
    """The rewards of the settings, or `reward` alone; tried once on a made-up response, so that a typo shows at once."""
    settings = config.rewards
    if reward is not None:
        scorer = rewards.Scorer({getattr(reward, "__name__", "reward"): reward}, workers=settings.workers)
    else:
        scorer = rewards.build(settings, problems.scorer, max_new_tokens=config.sampling.max_new_tokens)
    scorer.check(problems.train[0])
    return scorer


def _check_rows(config: Config, devices: int) -> None:
    rows = config.objective.micro_batch_rows or (
        config.sampling.prompts_per_step // config.objective.num_minibatches * config.sampling.group_size
    )
    if rows % devices:
        raise ConfigError(
            f"the {rows} rows of one pass (config.sampling.prompts_per_step={config.sampling.prompts_per_step} / "
            f"config.objective.num_minibatches={config.objective.num_minibatches} x config.sampling.group_size="
            f"{config.sampling.group_size}, or config.objective.micro_batch_rows) do not split over the {devices} devices of "
            f"config.mesh data x fsdp x expert: valid are multiples of {devices}."
        )


def _sampling_layout(abstract: Any, mesh: Mesh, dtype: jnp.dtype) -> Callable[[Any], Any]:
    """Casts the layers to the compute dtype and reshards the model, once before a rollout; nothing to do on one float32 device."""
    if mesh.size == 1 and dtype == jnp.float32:
        return lambda model: model

    def cast(model):
        """What the layers multiply by goes to the compute dtype; norms, routers, embedding and head stay float32, as in training."""
        model = jax.tree.map(lambda x: x, model)
        keep = lambda path: any(word in jax.tree_util.keystr(path) for word in ("norm", "router"))
        to_dtype = lambda path, x: x if keep(path) else x.astype(dtype)
        model.layers = jax.tree_util.tree_map_with_path(to_dtype, model.layers)
        return model

    return jax.jit(cast, out_shardings=sharding.sampling_shardings(jax.eval_shape(cast, abstract), mesh))


def _check_demonstrations(config: Config, problems: data.Problems, tokenizer: tokenizers.Tokenizer) -> None:
    """Every demonstration must exist and fit a response, known before the first update."""
    limit = config.sampling.max_new_tokens
    for example in (problems.train[i] for i in range(len(problems.train))):
        if not example.get("response"):
            raise ConfigError(
                f"config.sft.num_steps={config.sft.num_steps}: the training problem {example['prompt']!r} has no `response` to imitate; "
                f"it has {', '.join(example)}."
            )
        length = len(tokenizer.encode(example["response"])) + 1
        if length > limit:
            raise ConfigError(
                f"config.sampling.max_new_tokens={limit}: the demonstration of {example['prompt']!r} has {length} tokens with its end; "
                f"set it to at least that."
            )


def _demonstrations(run: Run) -> Callable[[int], tuple[Sequence[int], Sequence[int]]]:
    """The i-th demonstration of the stream: prompt ids, response ids with the EOS."""
    end = list(run.tokenizer.eos_ids[:1])

    def pair(index: int):
        example = run.stream[index]
        return run.encode(example), run.tokenizer.encode(example["response"]) + end

    return pair
