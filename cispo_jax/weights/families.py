"""Model families as they are published: `config.json` <-> `TransformerConfig` (their tensors: `layout.py`).

A family is a function that reads its settings and one that writes them. A setting that nothing here knows may change the
mathematics, so it is refused by name; `null` says that a setting is not used. Settings are those of transformers 5; MiniMax is also
read and written as it was first published (MiniMaxM1ForCausalLM).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cispo_jax.config import ConfigError, suggest
from cispo_jax.models.config import TransformerConfig

# ---------------------------------------------------------------------------------------------------------------------
# config.json -> TransformerConfig

# What does not enter the mathematics of a forward pass (dropout and router noise are of their training, not of ours).
_IGNORED = set(
    """
    architectures model_type auto_map transformers_version _name_or_path dtype torch_dtype use_cache initializer_range
    bos_token_id eos_token_id pad_token_id max_position_embeddings attention_dropout pretraining_tp max_window_layers
    output_router_logits router_aux_loss_coef router_jitter_noise shared_moe_mode return_dict output_attentions
    output_hidden_states is_llama_config transformers.js_config unsloth_version unsloth_fixed id2label label2id
    problem_type task_specific_params finetuning_task _attn_implementation_autoset
    """.split()
)
# Settings and the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (True,),  # written by some for Qwen2, which always has it
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "tie_encoder_decoder": (False,),
    "shared_intermediate_size": (0,),
}
_REQUIRED: Any = object()


class _Settings:
    """The settings of one `config.json`; what is wrong with them is collected and raised by `check` as one error."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.where = where
        self.taken: set[str] = set()
        self.missing: list[str] = []
        self.refused: list[str] = []

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        self.taken.add(name)
        value = self.values.get(name, default)
        if value is _REQUIRED:
            self.missing.append(name)
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if name in self.values and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            self.refuse(name, "a positive number is expected")
        elif value is not _REQUIRED:
            return value
        return 1  # goes on to find further errors

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        value = self.number(name, default)
        if value != int(value):
            self.refuse(name, "a whole number is expected")
        return int(value)

    def refuse(self, name: str, why: str = "") -> None:
        self.refused.append(f"{name}={self.values.get(name)!r}" + (f" ({why})" if why else ""))

    def check(self) -> None:
        for name, value in self.values.items():
            if name not in self.taken | _IGNORED and value not in _NEUTRAL.get(name, ()):
                self.refuse(name)
        if self.missing:
            raise ConfigError(f"{self.where}: settings that are missing: {', '.join(self.missing)}.")
        if self.refused:
            raise ConfigError(
                f"{self.where}: settings that are not supported and may change the mathematics: {'; '.join(self.refused)}."
            )


def read_config(values: dict[str, Any], where: str) -> TransformerConfig:
    """The architecture that a `config.json` describes; `where` is its path, for errors.

    Raises:
      ConfigError: an architecture that is not in `FAMILIES`, or settings that are missing, unknown or not supported, by name.
    """
    named = values.get("architectures")
    known = [name for family in FAMILIES.values() for name in family.architectures]
    if isinstance(named, list) and named and isinstance(named[0], str):
        name = named[0]
        family = next((family for family in FAMILIES.values() if name in family.architectures), None)
    else:
        name = str(values.get("model_type"))
        family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"{where}: the architecture {name!r} is not supported; supported: {', '.join(known)}.{suggest(name, known)}"
        )
    settings = _Settings(values, where)
    fields = family.read(settings)
    settings.check()
    try:
        return TransformerConfig(**fields)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None


def _decoder(s: _Settings, *, theta: float, eps: float, head_dim: int | None = None) -> dict[str, Any]:
    """What all families share; theta, eps and head_dim are the family's defaults in transformers."""
    heads, embed_dim = s.size("num_attention_heads"), s.size("hidden_size")
    return {
        "vocab_size": s.size("vocab_size"),
        "embed_dim": embed_dim,
        "num_layers": s.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": s.size("num_key_value_heads", heads),
        "head_dim": s.size("head_dim", head_dim or embed_dim // heads),
        "mlp_dim": s.size("intermediate_size"),
        "norm_eps": float(s.number("rms_norm_eps", eps)),
        "tied_head": bool(s.take("tie_word_embeddings", False)),
        "rope_theta": _rope_theta(s, theta),
        "context_length": s.size("max_position_embeddings", 0) or None,
    }


def _rope_theta(s: _Settings, default: float) -> float:
    """Theta, from the top level (transformers 4) or from `rope_parameters` (5); every rescaling of frequencies is refused."""
    theta = s.number("rope_theta", default)
    for name in ("rope_scaling", "rope_parameters"):
        parameters = s.take(name, {})
        if not isinstance(parameters, dict):
            s.refuse(name)
            continue
        changed = {
            key: value
            for key, value in parameters.items()
            if not (
                key == "rope_theta"
                or (key in ("rope_type", "type") and value == "default")
                or (key == "partial_rotary_factor" and value == 1)
                or value is None
            )
        }
        if changed:
            s.refuse(name, "rescaled or partial rotary frequencies")
        theta_here = parameters.get("rope_theta", theta)
        if "rope_theta" in s.values and theta_here != theta:
            s.refuse(name, f"it contradicts rope_theta={theta}")
        theta = theta_here
    return float(theta)


def _no_sliding_window(s: _Settings, *, switch: bool = False) -> None:
    """`sliding_window` counts when it is set or, in Qwen's, when `use_sliding_window` is too."""
    s.take("sliding_window", None)
    if "sliding_window" in s.values and not (switch and not s.values.get("use_sliding_window", False)):
        s.refuse("sliding_window")
    if switch and any(kind != "full_attention" for kind in s.take("layer_types", [])):
        s.refuse("layer_types", "only full_attention")


def _read_llama(s: _Settings) -> dict[str, Any]:
    return _decoder(s, theta=1e4, eps=1e-6)


def _read_qwen2(s: _Settings) -> dict[str, Any]:
    _no_sliding_window(s, switch=True)
    return _decoder(s, theta=1e4, eps=1e-6) | {"qkv_bias": True}


def _read_qwen3(s: _Settings) -> dict[str, Any]:
    _no_sliding_window(s, switch=True)
    return _decoder(s, theta=1e4, eps=1e-6, head_dim=128) | {"qk_norm": True}


def _read_qwen3_moe(s: _Settings) -> dict[str, Any]:
    _no_sliding_window(s, switch=True)
    fields = _decoder(s, theta=1e4, eps=1e-6)
    step, dense = s.size("decoder_sparse_step", 1), s.take("mlp_only_layers", [])
    layers = range(fields["num_layers"])
    kinds = ["moe" if layer not in dense and (layer + 1) % step == 0 else "dense" for layer in layers]
    old_name = s.take("num_experts", 0)  # transformers 5 writes num_local_experts
    return fields | {
        "qk_norm": True,
        "mlp": _shortest_period(kinds),
        "num_experts": s.size("num_local_experts", old_name or _REQUIRED),
        "experts_per_token": s.size("num_experts_per_tok"),
        "expert_dim": s.size("moe_intermediate_size"),
        "normalize_gates": bool(s.take("norm_topk_prob", False)),
    }


def _read_mixtral(s: _Settings) -> dict[str, Any]:
    _no_sliding_window(s)
    fields = _decoder(s, theta=1e6, eps=1e-5)
    return fields | {
        "mlp": ("moe",),
        "num_experts": s.size("num_local_experts"),
        "experts_per_token": s.size("num_experts_per_tok"),
        "expert_dim": fields["mlp_dim"],
    }


def _read_minimax(s: _Settings) -> dict[str, Any]:
    """transformers' dialect; its own model ignores `rotary_dim`, the published one does not."""
    fields = _read_mixtral(s)
    default = ["full_attention", "linear_attention"] * fields["num_layers"]
    kinds = s.take("layer_types", default[: fields["num_layers"]])
    names = {"full_attention": "softmax", "linear_attention": "lightning"}
    factors = lambda part: (float(s.number(f"{part}_alpha_factor", 1)), float(s.number(f"{part}_beta_factor", 1)))
    return fields | {
        "attention": _kinds_of_layers(s, "layer_types", kinds, names, fields["num_layers"]),
        "rotary_dim": _rotary_dim(s, fields),
        "postnorm": True,
        "softmax_residual": factors("full_attn"),
        "lightning_residual": factors("linear_attn"),
        "mlp_residual": factors("mlp"),
        "lightning_block": s.size("block_size", 256),
    }


def _read_minimax_m1(s: _Settings) -> dict[str, Any]:
    """The dialect of MiniMax-Text-01 and MiniMax-M1 as published."""
    fields = _read_mixtral(s)
    names = {1: "softmax", 0: "lightning"}
    kinds = _kinds_of_layers(s, "attn_type_list", s.take("attn_type_list"), names, fields["num_layers"])
    if "lightning" in kinds and fields["num_heads"] & (fields["num_heads"] - 1):
        s.refuse("num_attention_heads", "for other numbers than powers of two the published decay is another formula")
    factors = lambda part: (
        float(s.number(f"layernorm_{part}_alpha", 1)),
        float(s.number(f"layernorm_{part}_beta", 1)),
    )
    return fields | {
        "attention": kinds,
        "rotary_dim": _rotary_dim(s, fields),
        "postnorm": bool(s.take("postnorm", False)),
        "softmax_residual": factors("full_attention"),
        "lightning_residual": factors("linear_attention"),
        "mlp_residual": factors("mlp"),
    }


def _kinds_of_layers(s: _Settings, name: str, kinds: Any, names: dict[Any, str], num_layers: int) -> tuple[str, ...]:
    if kinds is _REQUIRED:
        return ("softmax",)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in names for kind in kinds):
        s.refuse(name, f"one of {', '.join(map(str, names))} for each of {num_layers} layers")
        return ("softmax",)
    return _shortest_period([names[kind] for kind in kinds])


def _rotary_dim(s: _Settings, fields: dict[str, Any]) -> int | None:
    rotary_dim = s.size("rotary_dim", fields["head_dim"])
    return None if rotary_dim == fields["head_dim"] else rotary_dim


def _shortest_period(kinds: list[str]) -> tuple[str, ...]:
    """The shortest prefix that repeated makes the whole list, a whole number of times."""
    lengths = (n for n in range(1, len(kinds) + 1) if len(kinds) % n == 0)
    return next(tuple(kinds[:n]) for n in lengths if kinds[:n] * (len(kinds) // n) == kinds)


# ---------------------------------------------------------------------------------------------------------------------
# TransformerConfig -> config.json


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of the family that the architecture belongs to, for transformers 4 and 5.

    Raises:
      ConfigError: no family has these fields together: read back, the file would describe another model.
    """
    name = family_of(config)
    values = {
        "architectures": [FAMILIES[name].architectures[0]],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "rope_theta": config.rope_theta,
        "use_cache": True,
    }
    if name != "minimax_m1":
        values["rope_parameters"] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.context_length:
        values["max_position_embeddings"] = config.context_length
    values |= FAMILIES[name].write(config)
    if name.startswith("minimax") and "moe" not in config.mlp:
        lost = [f"mlp={config.mlp!r}"]  # it would be written with experts of size 0
    else:
        read, wanted = (_canonical(c) for c in (read_config(values, "config.json"), config))
        fields = [field.name for field in dataclasses.fields(config)]
        lost = [
            f"{field}={getattr(wanted, field)!r}" for field in fields if getattr(read, field) != getattr(wanted, field)
        ]
    if lost:
        raise ConfigError(
            f"this architecture cannot be written for other programs: no published family has {', '.join(lost)} (the closest "
            f"is {FAMILIES[name].architectures[0]}). The checkpoint of the run keeps it."
        )
    return values


def family_of(config: TransformerConfig) -> str:
    """The only family that may fit; `write_config` checks whether it does."""
    if "lightning" in config.attention or config.postnorm:
        whole = config.rotary_dim in (None, config.head_dim)
        return "minimax" if config.postnorm and whole else "minimax_m1"
    if "moe" in config.mlp:
        return "qwen3_moe" if config.qk_norm else "mixtral"
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def _write_qwen3_moe(config: TransformerConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.mlp_dim or config.expert_dim,
        "moe_intermediate_size": config.expert_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_gates,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if config.kinds(layer)[1] == "dense"],
    }


def _write_mixtral(config: TransformerConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.expert_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }


def _write_minimax(config: TransformerConfig) -> dict[str, Any]:
    names = {"softmax": "full_attention", "lightning": "linear_attention"}
    return _write_mixtral(config) | {
        "layer_types": [names[config.kinds(layer)[0]] for layer in range(config.num_layers)],
        "block_size": config.lightning_block,
        **dict(zip(("full_attn_alpha_factor", "full_attn_beta_factor"), config.softmax_residual, strict=True)),
        **dict(zip(("linear_attn_alpha_factor", "linear_attn_beta_factor"), config.lightning_residual, strict=True)),
        **dict(zip(("mlp_alpha_factor", "mlp_beta_factor"), config.mlp_residual, strict=True)),
    }


def _write_minimax_m1(config: TransformerConfig) -> dict[str, Any]:
    values = _write_mixtral(config) | {
        "attn_type_list": [int(config.kinds(layer)[0] == "softmax") for layer in range(config.num_layers)],
        "rotary_dim": config.rotary_dim or config.head_dim,
        "postnorm": config.postnorm,
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
    }
    for part, (alpha, beta) in {
        "full_attention": config.softmax_residual,
        "linear_attention": config.lightning_residual,
        "mlp": config.mlp_residual,
    }.items():
        values |= {f"layernorm_{part}_alpha": alpha, f"layernorm_{part}_beta": beta}
    return values


def _canonical(config: TransformerConfig) -> TransformerConfig:
    """The architecture with the fields that it does not use at one value, so that equal models compare equal."""
    attention = _shortest_period([config.kinds(layer)[0] for layer in range(config.num_layers)])
    mlp = _shortest_period([config.kinds(layer)[1] for layer in range(config.num_layers)])
    unused: dict[str, Any] = {"lightning_block": 0, "file_dtype": "float32", "attention": attention, "mlp": mlp}
    if "dense" not in mlp:
        unused |= {"mlp_dim": 0}
    if "moe" not in mlp:
        unused |= {"num_experts": 0, "experts_per_token": 0, "expert_dim": 0, "normalize_gates": True}
    for kind in {"softmax", "lightning"} - set(attention):
        unused |= {f"{kind}_residual": (1.0, 1.0)}
    if config.rotary_dim == config.head_dim or "softmax" not in attention:
        unused |= {"rotary_dim": None}
    return dataclasses.replace(config, **unused)


# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Names of the architecture in `config.json` (the first is written), and its settings in and out."""

    architectures: tuple[str, ...]
    read: Callable[[_Settings], dict[str, Any]]
    write: Callable[[TransformerConfig], dict[str, Any]] = lambda config: {}


FAMILIES = {
    "llama": Family(("LlamaForCausalLM",), _read_llama),
    "qwen2": Family(("Qwen2ForCausalLM",), _read_qwen2),
    "qwen3": Family(("Qwen3ForCausalLM",), _read_qwen3),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",), _read_qwen3_moe, _write_qwen3_moe),
    "mixtral": Family(("MixtralForCausalLM",), _read_mixtral, _write_mixtral),
    "minimax": Family(("MiniMaxForCausalLM",), _read_minimax, _write_minimax),
    "minimax_m1": Family(("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"), _read_minimax_m1, _write_minimax_m1),
}
