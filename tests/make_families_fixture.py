"""Writes tests/data/families/NAME: tiny random models of every family as transformers saves them, and what it computes with them.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/make_families_fixture.py
Half a minute. The tests do not run it (tests/slow/test_families_parity.py compares live): make the files again only when the models
below change.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent / "data" / "families"
VOCABULARY, PROMPT, NEW_TOKENS = 40, 9, 32
BASE = dict(vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=128, initializer_range=0.3)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
# Family -> (class, settings); heads are 8 wide, or 20 / 2 = 10, or not hidden / heads.
MODELS = {
    "llama": (
        "Llama",
        dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1, intermediate_size=32)
        | dict(tie_word_embeddings=True, rms_norm_eps=1e-5),
    ),
    "qwen2": ("Qwen2", dict(hidden_size=20, num_attention_heads=2, num_key_value_heads=2, intermediate_size=28)),
    "qwen3": (
        "Qwen3",
        dict(hidden_size=20, num_attention_heads=4, num_key_value_heads=2, intermediate_size=28, head_dim=8),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=1, intermediate_size=24, head_dim=8)
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=False)
        | dict(mlp_only_layers=[], decoder_sparse_step=1),
    ),
    "mixtral": (
        "Mixtral",
        dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=12, head_dim=8) | MOE,
    ),
    "minimax": (
        "MiniMax",
        dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=12, head_dim=8)
        | MOE
        | dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2, block_size=4)
        | dict(full_attn_alpha_factor=1.3, full_attn_beta_factor=0.9, linear_attn_alpha_factor=1.2)
        | dict(linear_attn_beta_factor=1.1, mlp_alpha_factor=0.8, mlp_beta_factor=1.4),
    ),
}
# Parameters whose gradients are kept, at the layer named (of MiniMax, the softmax layer).
GRADIENTS = ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight")


def make_model(name: str, seed: int = 0, **changes) -> torch.nn.Module:
    """A random model whose weights are bfloat16 numbers; norms and biases are not all ones and zeros."""
    torch.manual_seed(seed)
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**BASE | settings | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            parameter.copy_(parameter.bfloat16().float())
    return model


def logits(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Without its cache, which numbers MiniMax's positions wrongly when layer 0 is linear."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()


def reference(model: torch.nn.Module, seed: int = 1) -> dict[str, np.ndarray]:
    """Logits of a left-padded batch, its greedy continuation, gradients of the mean negative log-prob of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (2, PROMPT), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    found = logits(model, tokens, mask)
    log_probs = found[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    real = (mask[:, :-1] * mask[:, 1:]).float()
    loss = -(log_probs * real).sum() / real.sum()
    parameters = dict(model.named_parameters())
    names = [name for name in GRADIENTS if name in parameters]
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names])
    longer, longer_mask = tokens, mask
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            best = logits(model, longer, longer_mask)[:, -1:].argmax(-1)
            longer, longer_mask = torch.cat([longer, best], 1), torch.cat([longer_mask, torch.ones_like(best)], 1)
    arrays = {"tokens": tokens, "mask": mask.bool(), "logits": found, "greedy": longer[:, PROMPT:], "loss": loss}
    arrays |= dict(zip(names, gradients, strict=True))
    return {name: array.detach().numpy() for name, array in arrays.items()}


def published_minimax(settings: dict) -> dict:
    """The same settings in the words of MiniMax-M1's own config.json."""
    shared = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act"
    shared += " rms_norm_eps num_local_experts num_experts_per_tok tie_word_embeddings max_position_embeddings"
    published = {name: settings[name] for name in shared.split()}
    for ours, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for factor in ("alpha", "beta"):
            published[f"layernorm_{theirs}_{factor}"] = settings[f"{ours}_{factor}_factor"]
    return published | {
        "architectures": ["MiniMaxM1ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m1.MiniMaxM1ForCausalLM"},
        "model_type": "minimax_m1",
        "attn_type_list": [int(kind == "full_attention") for kind in settings["layer_types"]],
        "postnorm": True,
        "rotary_dim": settings["head_dim"],
        "rope_theta": settings["rope_parameters"]["rope_theta"],
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.2",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in MODELS:
        model = make_model(name)
        # One file in bfloat16, or several shards.
        model.bfloat16().save_pretrained(FOLDER / name, max_shard_size="12KB" if "mi" in name else "1GB")
        np.savez_compressed(FOLDER / name / "reference.npz", **reference(make_model(name)))
        (FOLDER / name / "generation_config.json").unlink()
    settings = json.loads((FOLDER / "minimax" / "config.json").read_text())
    (FOLDER / "minimax" / "config_published.json").write_text(json.dumps(published_minimax(settings), indent=2) + "\n")
    print(sum(path.stat().st_size for path in FOLDER.rglob("*.*")), "bytes in", FOLDER)


if __name__ == "__main__":
    main()
