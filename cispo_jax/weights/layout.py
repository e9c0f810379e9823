"""The tensors of every family by name: one table from our parameters to those of the files, used for reading and writing.

Names and layouts are those of transformers 5 on disk (linear layers are [out, in]).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cispo_jax.models.config import TransformerConfig
from cispo_jax.weights.families import family_of


@dataclass(frozen=True)
class Source:
    """How one parameter of one layer (and expert) lies in a file.

    Attributes:
      name: of the tensor, with {layer} and {expert}.
      stored: its axes there as letters; a comma separates dimensions, letters between commas are merged into one (row-major).
      ours: the axes of our parameter, in order.
      part: where one dimension holds several parameters one after the other (axis "3"), which of them.
    """

    name: str
    stored: str
    ours: str
    part: int = 0


# Axes: V vocabulary, D embedding, N query heads, M key heads, H head, F feed-forward, X feed-forward of an expert, E experts.
_TOP = {
    "embedding": Source("model.embed_tokens.weight", "V,D", "VD"),
    "final_norm": Source("model.norm.weight", "D", "D"),
    "head": Source("lm_head.weight", "V,D", "DV"),
}
_NORMS = {
    "attention_norm": Source("input_layernorm.weight", "D", "D"),
    "mlp_norm": Source("post_attention_layernorm.weight", "D", "D"),
}
_SOFTMAX = {
    "attention.query": Source("self_attn.q_proj.weight", "NH,D", "DNH"),
    "attention.key": Source("self_attn.k_proj.weight", "MH,D", "DMH"),
    "attention.value": Source("self_attn.v_proj.weight", "MH,D", "DMH"),
    "attention.output": Source("self_attn.o_proj.weight", "D,NH", "NHD"),
}
_QKV_BIAS = {
    "attention.query_bias": Source("self_attn.q_proj.bias", "NH", "NH"),
    "attention.key_bias": Source("self_attn.k_proj.bias", "MH", "MH"),
    "attention.value_bias": Source("self_attn.v_proj.bias", "MH", "MH"),
}
_QK_NORM = {
    "attention.query_norm": Source("self_attn.q_norm.weight", "H", "H"),
    "attention.key_norm": Source("self_attn.k_norm.weight", "H", "H"),
}
_LIGHTNING = {
    "attention.query": Source("self_attn.qkv_proj.weight", "N3H,D", "DNH", part=0),
    "attention.key": Source("self_attn.qkv_proj.weight", "N3H,D", "DNH", part=1),
    "attention.value": Source("self_attn.qkv_proj.weight", "N3H,D", "DNH", part=2),
    "attention.gate": Source("self_attn.output_gate.weight", "NH,D", "DNH"),
    "attention.norm": Source("self_attn.norm.weight", "NH", "NH"),
    "attention.output": Source("self_attn.out_proj.weight", "D,NH", "NHD"),
}
_DENSE = {
    "mlp.gate": Source("mlp.gate_proj.weight", "F,D", "DF"),
    "mlp.up": Source("mlp.up_proj.weight", "F,D", "DF"),
    "mlp.down": Source("mlp.down_proj.weight", "D,F", "FD"),
}


def _experts(router: str, gate: str, up: str, down: str) -> dict[str, Source]:
    return {
        "mlp.router": Source(router, "E,D", "DE"),
        "mlp.gate": Source(gate, "X,D", "DX"),
        "mlp.up": Source(up, "X,D", "DX"),
        "mlp.down": Source(down, "D,X", "XD"),
    }


_QWEN_EXPERTS = _experts(
    "mlp.gate.weight",
    "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.{expert}.up_proj.weight",
    "mlp.experts.{expert}.down_proj.weight",
)
_MIXTRAL_EXPERTS = _experts(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{expert}.w1.weight",
    "block_sparse_moe.experts.{expert}.w3.weight",
    "block_sparse_moe.experts.{expert}.w2.weight",
)
# In files, and made again from the config: the decay of lightning attention (transformers), rotary frequencies (old Llamas).
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class Leaf:
    """A parameter of the model, possibly stacked over layers and experts, and the tensors it is made of.

    Attributes:
      layers: the layers that are stacked, () where the parameter belongs to none.
      num_experts: 0 where the parameter is not stacked over experts.
      sizes: size of every axis.
    """

    source: Source
    layers: tuple[int, ...]
    num_experts: int
    sizes: dict[str, int]

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the stacked axes: each place there is a tensor of its own."""
        return (len(self.layers),) * bool(self.layers) + (self.num_experts,) * bool(self.num_experts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leading + tuple(self.sizes[axis] for axis in self.source.ours)

    @property
    def stored_axes(self) -> str:
        """One letter for each axis of the tensor once merged dimensions are taken apart."""
        return self.source.stored.replace(",", "")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[axis] for axis in merged) for merged in self.source.stored.split(","))

    def name(self, place: tuple[int, ...]) -> str:
        """The tensor at one place of the stacked axes."""
        layer = f"model.layers.{self.layers[place[0]]}." if self.layers else ""
        return layer + self.source.name.format(expert=place[-1] if place else "")


def leaves(config: TransformerConfig) -> dict[str, Leaf]:
    """Every parameter by its path in the model (`layers.0.attention.query`) with the tensors it is made of."""
    sizes = {"V": config.vocab_size, "D": config.embed_dim, "N": config.num_heads, "M": config.num_kv_heads}
    sizes |= {"H": config.head_dim, "F": config.mlp_dim, "X": config.expert_dim, "E": config.num_experts, "3": 3}
    found = {
        name: Leaf(source, (), 0, sizes) for name, source in _TOP.items() if name != "head" or not config.tied_head
    }
    experts = _QWEN_EXPERTS if family_of(config) == "qwen3_moe" else _MIXTRAL_EXPERTS
    softmax = _SOFTMAX | (_QKV_BIAS if config.qkv_bias else {}) | (_QK_NORM if config.qk_norm else {})
    for place in range(config.period):
        attention, mlp = config.kinds(place)
        block = _NORMS | (softmax if attention == "softmax" else _LIGHTNING) | (_DENSE if mlp == "dense" else experts)
        for name, source in block.items():
            num_experts = config.num_experts if "{expert}" in source.name else 0
            layers = tuple(range(place, config.num_layers, config.period))
            found[f"layers.{place}.{name}"] = Leaf(source, layers, num_experts, sizes)
    return found
