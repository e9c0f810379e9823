"""What a run computes on its devices: the compiled functions, the layouts they expect, and the objective they train on.

Made from settings, an architecture and a mesh alone, so that a plan can compile them for devices that are not there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cispo_jax import models, objectives, rewards, sharding
from cispo_jax.config import Config, ConfigError, ObjectiveSettings, suggest
from cispo_jax.log_probs import fused_token_log_probs
from cispo_jax.objectives import aggregation_weights
from cispo_jax.routing import RouterSums
from cispo_jax.sampling import sample_groups, slots
from cispo_jax.training.optimizer import make_optimizer
from cispo_jax.training.packing import Layout, Places, pack
from cispo_jax.training.train_step import init_state, make_score_step, make_train_step
from cispo_jax.types import Batch, Packed, Rollout, TrainState

OBJECTIVES: dict[str, Callable] = {
    name: getattr(objectives, f"{name}_loss")
    for name in ("cispo", "reinforce", "ppo", "grpo", "dapo", "gspo", "unified")
}

SHORT = 256  # tokens of a response below which all rows decode in one program: it compiles once, and there is little to wait for
MEMORY_SHARE = 0.7  # of what is free, for the caches of the slots: the next size of a cache is made beside the last one
CHUNK_TOKENS, CHUNK_LOGITS = 256, 2**24  # of each device at a time: tokens, and numbers of their logits (64 MiB)


@dataclass
class Programs:
    """The functions that a loop calls on its devices, and where their arguments lie."""

    mesh: Mesh  # of training
    sampling_mesh: Mesh  # the same devices, split for sampling
    optimizer: Any
    abstract_state: TrainState
    shardings: TrainState
    new_model: Callable[[], Any]  # random weights on their shards
    log_probs_fn: Callable
    coefficients: Callable[
        ..., np.ndarray
    ]  # (loss mask [B, T], group ids [B]) of a mini-batch -> of each token in its loss
    layout: Layout  # of a mini-batch
    kernel: str  # of attention in training
    layout_of: Callable[..., Layout]  # of so many `prompts` and a `group_size`
    pack: Callable[
        ..., tuple[Packed, Places]
    ]  # (mini-batch on the host[, layout]) -> on the devices, and where each response went
    train_step: Callable
    score_step: Callable
    to_sampling: Callable[[Any], Any]
    sample: Callable[..., Rollout]
    slots: int  # responses that decode at a time; 0: all, in one program
    shard_rows: Callable[[np.ndarray], jax.Array]

    def init_state(self, model: Any) -> TrainState:
        """The optimizer state of `model`, sharded from birth; the model is donated."""
        return jax.jit(lambda m: init_state(m, self.optimizer), out_shardings=self.shardings, donate_argnums=0)(model)


def make_programs(
    config: Config,
    architecture: models.TransformerConfig,
    mesh: Mesh,
    *,
    prompt_width: int,
    max_tokens: int | None = None,
    pad_id: int = 0,
    eos_ids: tuple[int, ...] = (),
    objective: tuple[Callable, str, float] | None = None,
    sample_fn: Callable | None = None,
    memory: int | None = None,
) -> Programs:
    """The programs of a run; nothing is compiled yet.

    Args:
      mesh: of training; of devices at hand, or of a topology to compile for.
      prompt_width: S, columns that prompts are padded to. max_tokens: what the model was made for, None = not known.
      objective: of `resolve_objective`; None: that of the settings.
      sample_fn: a sampler in place of ours.
      memory: bytes of a device, None = not known; as many responses decode at a time as their caches fit in it.

    Raises:
      ConfigError: a mesh that does not divide rows, layers or experts.
    """
    _check_experts(config, architecture)
    loss_fn, aggregation, cap = objective or resolve_objective(config.objective, None, [])
    devices = sharding.batch_devices(mesh)
    _check_responses(config, devices)
    sampling_mesh = sharding.sampling_mesh(mesh, config.mesh.sampling)
    if config.sampling.slots % sharding.batch_devices(sampling_mesh):
        raise ConfigError(
            f"config.sampling.slots={config.sampling.slots}: valid are multiples of the {sharding.batch_devices(sampling_mesh)} devices "
            "that split rows while sampling (all but config.mesh.sampling.tensor), or 0."
        )
    sharding.check_divisible(architecture, mesh)
    sharding.check_divisible(architecture, sampling_mesh, "config.mesh.sampling", sharding.SAMPLING_RULES)
    optimizer = make_optimizer(config.optimizer)
    dtype = jnp.dtype(config.model.dtype)
    key = jax.random.key(config.seed)
    abstract = jax.eval_shape(lambda: init_state(models.Transformer(architecture, key=key), optimizer))
    shardings = sharding.state_shardings(abstract, mesh)

    sampler = sample_groups if sample_fn is None else sample_fn
    layout = {
        "prompt_width": prompt_width,
        "max_tokens": max_tokens,
        "pad_id": pad_id,
        "dtype": dtype,
        "shard_rows": functools.partial(sharding.shard_rows, sampling_mesh),
        "sync_tokens": config.sampling.sync_tokens,
        "repetition_stop": config.sampling.repetition_stop,
    }

    to_sampling = sampling_layout(abstract.model, sampling_mesh, dtype)
    held = _bytes_of_device(abstract, shardings)
    if config.objective.kl:  # the reference policy
        held += _bytes_of_device(abstract.model, shardings.model)
    model = abstract.model
    if hasattr(to_sampling, "lower"):  # one float32 device samples from the model that it trains
        model = jax.eval_shape(to_sampling, abstract.model)
        held += _bytes_of_device(model, sharding.state_shardings(model, sampling_mesh, sharding.SAMPLING_RULES))
    free = None if memory is None else memory - held
    slots_chosen = choose_slots(config, model, prompt_width, sampling_mesh, free)

    def sample(model, prompts, **options):
        common = {"max_new_tokens": config.sampling.max_new_tokens, "eos_ids": eos_ids}
        return sampler(model, prompts, **_accepted(sampler, layout | {"slots": slots_chosen} | options) | common)

    S, T = prompt_width, config.sampling.max_new_tokens
    prompts = config.sampling.prompts_per_step // config.objective.num_minibatches
    sizes = dict(prompt=S, response=T, devices=devices, pass_tokens=config.objective.micro_batch_tokens)
    if isinstance(loss_fn, ByRows) and loss_fn.whole:
        sizes["pass_tokens"] = prompts * config.sampling.group_size * (S + T)
    packed = config.objective.packing and not isinstance(loss_fn, ByRows)
    kernel = choose_kernel(config, architecture, mesh.devices.flat[0].platform, prompt_width, packed)
    layout_of = functools.partial(Layout.of, **sizes, packed=packed, shared=kernel == "blocks")
    of_minibatch = layout_of(prompts=prompts, group_size=config.sampling.group_size)

    log_probs_fn = functools.partial(
        response_log_probs,
        packed=packed,
        kernel=kernel,
        temperature=config.sampling.temperature,
        dtype=dtype,
        remat=config.model.remat,
        chunk_size=chunk_tokens(architecture.vocab_size) * devices,
    )

    @jax.jit
    def coefficients(loss_mask, group_ids):
        B, T = loss_mask.shape
        normalizer = float(B * T) if aggregation == "constant" else None
        return aggregation_weights(loss_mask, aggregation=aggregation, group_ids=group_ids, normalizer=normalizer)

    def pack_on_devices(batch: Batch, layout: Layout = of_minibatch) -> tuple[Packed, Places]:
        packed, places = pack(batch, layout)
        return sharding.shard_passes(mesh, packed), places

    train_step = make_train_step(
        log_probs_fn,
        loss_fn,
        optimizer,
        importance_cap=config.objective.truncated_importance_cap,
        epsilon_high=cap,
        load_balance=config.objective.load_balance,
        router_z=config.objective.router_z,
        kl=config.objective.kl,
        kl_estimator=config.objective.kl_estimator,
        shardings=shardings,
    )
    return Programs(
        mesh=mesh,
        sampling_mesh=sampling_mesh,
        optimizer=optimizer,
        abstract_state=abstract,
        shardings=shardings,
        new_model=jax.jit(lambda: models.Transformer(architecture, key=key), out_shardings=shardings.model),
        log_probs_fn=log_probs_fn,
        coefficients=lambda *arrays: np.asarray(coefficients(*arrays)),
        layout=of_minibatch,
        kernel=kernel,
        layout_of=layout_of,
        pack=pack_on_devices,
        train_step=sharding.OnMesh(mesh, train_step),
        score_step=sharding.OnMesh(mesh, make_score_step(log_probs_fn)),
        to_sampling=to_sampling,
        sample=sharding.OnMesh(sampling_mesh, sample),
        slots=slots_chosen,
        shard_rows=functools.partial(sharding.shard_rows, mesh),
    )


def response_log_probs(
    model: Any,
    rows: Packed,
    *,
    packed: bool = True,
    kernel: str = "blocks",
    temperature: float = 1.0,
    dtype: jnp.dtype = jnp.float32,
    remat: str = "off",
    chunk_size: int = CHUNK_TOKENS,
) -> tuple[jax.Array, jax.Array, RouterSums | None]:
    """A `LogProbsFn`: the same layers, head and temperature as the sampler's.

    Args:
      packed: False: each row is one response. kernel: of attention; all but "blocks" need a copy of its prompt before each response.
    """
    # A pass comes from the rows of some devices only: without this they alone would look its tokens up.
    tokens, segments = map(sharding.split_rows, (rows.tokens, rows.segment_ids))
    states = models.hidden_states(
        model,
        tokens,
        segments > 0,
        segment_ids_BT=segments if packed else None,
        prefix_ids_BT=rows.prefix_ids if packed and kernel == "blocks" else None,
        positions_BT=rows.positions,
        weight_BT=rows.weights,
        expert_ids_BTLK=rows.expert_ids,
        dtype=dtype,
        remat=remat,
        kernel=kernel,
    )
    log_probs, entropy = fused_token_log_probs(
        jax.vmap(lambda hidden_XD, source_Y: hidden_XD[source_Y])(states.hidden_BTD, rows.source),
        sharding.whole(models.head_matrix(model), None, "tensor"),
        rows.targets,
        temperature=temperature,
        chunk_size=chunk_size,
        head_shards=sharding.shards("tensor"),
    )
    return log_probs, entropy, models.router_sums(states.routing)


def describe_updates(config: Config, aggregation: str, custom: bool = False) -> str:
    """One paragraph of what the settings of the objective come to, for the log; `custom`: a function from Python in place of its name."""
    o, optimizer = config.objective, config.optimizer
    bounds = "of your own" if custom or ":" in o.name else f"{o.name}: {_bounds(o)}"
    updates = o.num_minibatches * o.num_epochs
    warmup = {
        "rollout_steps": (optimizer.warmup, optimizer.warmup * updates),
        "updates": (optimizer.warmup / updates, optimizer.warmup),
    }
    rollouts, of_updates = warmup[optimizer.warmup_unit]
    parts = [
        f"objective {bounds}, {aggregation} aggregation, anchor {o.anchor}",
        f"advantages by {o.advantage}" + (f", scaled by {o.advantage_scale}" if o.advantage == "group" else ""),
        f"{updates} updates a batch ({o.num_minibatches} mini-batches x {o.num_epochs} epochs)",
        f"warm-up {rollouts:g} rollout steps = {of_updates:g} updates",
    ]
    if o.kl:
        parts.append(f"KL to the starting weights {o.kl:g} x {o.kl_estimator}")
    if o.truncated_importance_cap is not None:
        parts.append(f"truncated importance weights up to {o.truncated_importance_cap:g}")
    buffer = config.rewards.overlong_buffer
    truncated = "kept" if o.train_truncated else "out of the loss"
    parts.append(
        f"truncated responses {truncated}" + (f", penalised over the last {buffer:,} tokens" if buffer else "")
    )
    return "; ".join(parts)


def _bounds(settings: ObjectiveSettings) -> str:
    """Where the weight (or PPO's ratio) of a built-in objective lies."""
    defaults = inspect.signature(getattr(objectives, f"{settings.name}_loss")).parameters
    default = lambda name: defaults[name].default if name in defaults else None
    low, high = default("weight_clip") or (default("epsilon_low"), default("epsilon_high"))
    low = low if settings.epsilon_low is None else settings.epsilon_low
    high = high if settings.epsilon_high is None else settings.epsilon_high
    return f"ratio in [{0 if low is None or low >= 1 else 1 - low:g}, {'inf' if high is None else f'{1 + high:g}'}]"


def chunk_tokens(vocab_size: int) -> int:
    """How many tokens of a device have their logits in memory at a time."""
    return max(32, min(CHUNK_TOKENS, CHUNK_LOGITS // vocab_size // 32 * 32))


def sampling_layout(abstract: Any, mesh: Mesh, dtype: jnp.dtype) -> Callable[[Any], Any]:
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

    return jax.jit(
        cast, out_shardings=sharding.state_shardings(jax.eval_shape(cast, abstract), mesh, sharding.SAMPLING_RULES)
    )


def choose_slots(config: Config, model: Any, prompt_width: int, mesh: Mesh, free: int | None) -> int:
    """How many of a step's responses decode at a time: the setting, or as many as fit; 0: all of them, in one program.

    Args:
      model: in its layout for sampling, shapes are enough. mesh: of sampling.
      free: bytes of each device beside the model and the training state; None: enough. What is free at the moment would not do: a
        run that goes on after a restart would choose another number, and round differently.
    """
    sampling, devices = config.sampling, sharding.batch_devices(mesh)
    if sampling.slots:
        return sampling.slots
    rows = -(-sampling.prompts_per_step * sampling.group_size // devices)  # of a device
    fitting = rows
    if free is not None:
        record = config.objective.routing_replay
        size = slots.bytes_of_row(model, prompt_width, sampling.max_new_tokens, config.model.dtype, record)
        fitting = max(1, int(MEMORY_SHARE * free * mesh.shape["tensor"] / size))
    if fitting >= rows and sampling.max_new_tokens < SHORT:
        return 0
    return min(rows, fitting) * devices


def choose_kernel(
    config: Config, architecture: models.TransformerConfig, platform: str, prompt_width: int, packed: bool
) -> str:
    """The kernel of attention over whole sequences in training, a value of `config.model.attention` other than auto.

    The kernels of TPUs and GPUs cannot mask prefixes. With packing a prompt is then repeated before each of its responses, which costs
    less than the kernel gains where prompts are short beside responses.
    """
    name, on = config.model.attention, {"splash": "tpu", "cudnn": "gpu"}
    if name == "auto":
        short = 4 * prompt_width <= config.sampling.max_new_tokens
        if "softmax" not in architecture.attention:
            return "blocks"
        if platform == "tpu" and (short or not packed):
            return "splash"
        return "cudnn" if platform == "gpu" and not packed and config.model.dtype == "bfloat16" else "blocks"
    if name in on and platform != on[name]:
        raise ConfigError(
            f"config.model.attention={name} is a kernel for {on[name].upper()}s and these devices are {platform.upper()}s: valid here are "
            f"{', '.join(['auto', 'blocks', *(kernel for kernel, its in on.items() if its == platform)])}."
        )
    if name == "cudnn" and packed:
        raise ConfigError(
            "config.model.attention=cudnn cannot mask the segments of packed rows: config.objective.packing=False, or "
            "config.model.attention=blocks."
        )
    if name == "cudnn" and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"config.model.attention=cudnn computes in bfloat16 and config.model.dtype={config.model.dtype}; valid then: auto or blocks."
        )
    return name


def _bytes_of_device(tree: Any, shardings: Any) -> int:
    """Of each device's share."""
    size = lambda x, s: int(np.prod(s.shard_shape(x.shape))) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def _check_experts(config: Config, architecture: models.TransformerConfig) -> None:
    for name in ("load_balance", "router_z", "routing_replay"):
        if getattr(config.objective, name) and "moe" not in architecture.mlp:
            raise ConfigError(
                f"config.objective.{name}={getattr(config.objective, name)}: the model has no experts; leave it out."
            )


def _check_responses(config: Config, devices: int) -> None:
    sampling, minibatches = config.sampling, config.objective.num_minibatches
    responses = sampling.prompts_per_step // minibatches * sampling.group_size
    if responses < devices:
        raise ConfigError(
            f"the {responses} responses of a mini-batch (config.sampling.prompts_per_step={sampling.prompts_per_step} / "
            f"config.objective.num_minibatches={minibatches} x config.sampling.group_size={sampling.group_size}) are fewer than the "
            f"{devices} devices of config.mesh data x fsdp x expert that split them: some would have nothing to do."
        )


class ByRows:
    """An objective of one's own that takes no `segment_ids`, so that a row must be one response; advantages are [B] as ever.

    `whole`: it reduces as it likes, so that a mini-batch must be one pass.
    """

    def __init__(self, function: Callable, whole: bool = False):
        self.function, self.whole = function, whole

    def __call__(self, log_probs, old_log_probs, advantages, loss_mask, *, segment_ids=None, **options):
        return self.function(log_probs, old_log_probs, advantages[:, 0], loss_mask, **options)


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
        if "segment_ids" not in parameters:
            bind = ByRows(bind)
            notes.append(
                f"the objective {name} names no segment_ids: responses are not packed, each has a row of its own"
            )
        if not _check_objective(name, bind, settings, notes):
            bind = ByRows(getattr(bind, "function", bind), whole=True)
    return bind, aggregation, cap


def _check_objective(name: str, loss_fn: Callable, settings: ObjectiveSettings, notes: list[str]) -> bool:
    """A trial of a user's objective on tiny arrays: it must return (loss, metrics), be differentiable under `jit`, and should be
    sum(coefficient x term), which is returned."""
    log_probs = -jnp.linspace(0.5, 2.0, 6).reshape(2, 3)  # not square: a missing axis must not pass
    advantages = jnp.array([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    arrays = (log_probs, log_probs - 0.1, advantages, jnp.ones((2, 3), bool))

    def loss_of(*arrays):
        loss, metrics = loss_fn(*arrays[:-1], aggregation=arrays[-1], segment_ids=jnp.ones((2, 3), jnp.int32))
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
        if settings.micro_batch_tokens:
            raise ConfigError(
                f"config.objective.micro_batch_tokens={settings.micro_batch_tokens}: {message}; micro-batches would not add up."
            )
        notes.append(f"warning: {message}; config.objective.aggregation has no effect.")
        return False
    return True


def _accepted(function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that the function takes: a user's sampler need not know our layout."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}
