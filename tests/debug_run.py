"""Small runs for the tests: the debug page with changes, on a list of sums and on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax import building, models, programs, sharding
from cispo_jax.config import Config, MeshSettings, from_config_dict
from cispo_jax.log_probs import fused_token_log_probs
from cispo_jax.models import Transformer, TransformerConfig
from cispo_jax.training import packing
from cispo_jax.training.packing import Layout
from cispo_jax.training.train_step import make_score_step
from cispo_jax.types import Batch
from configs import debug

SUMS = [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 9) for b in range(2, 9)]
TINY = TransformerConfig(17, 16, 2, 4, 2, 4, 24)  # smaller than the smallest preset: compiles in a blink
EXPERTS = dict(mlp=("moe",), num_experts=4, experts_per_token=2, expert_dim=8)
MINIMAX = dict(
    attention=("lightning", "softmax"), postnorm=True, softmax_residual=(1.5, 0.75), lightning_residual=(1.25, 0.5),
    mlp_residual=(0.75, 1.5), rotary_dim=2, lightning_block=4, tied_head=False, num_layers=4,
)  # fmt: skip
# Every kind of attention and of feed-forward.
FAMILIES = {
    "mixtral": dataclasses.replace(TINY, **EXPERTS),
    "qwen3_moe": dataclasses.replace(TINY, **EXPERTS, qk_norm=True, normalize_gates=False),
    "lightning": dataclasses.replace(TINY, attention=("lightning",), lightning_block=4),
    "minimax": dataclasses.replace(TINY, **EXPERTS, **MINIMAX),
    # Periods of 3 and 2: six different layers.
    "mixed": dataclasses.replace(
        TINY, **EXPERTS | {"mlp": ("dense", "moe")}, attention=("lightning", "lightning", "softmax"), num_layers=6, lightning_block=4
    ),
}  # fmt: skip


def config(**changes) -> Config:
    """The debug page; `sampling__group_size=2` changes `config.sampling.group_size`."""
    page = debug.get_config()
    page.mesh.fsdp = 1
    page.logging.tensorboard = False
    page.evaluation.every = 0
    page.evaluation.num_problems = 4
    page.evaluation.samples = 0
    page.sampling.dynamic = False
    page.sampling.prompts_per_step = page.sampling.group_size = 4
    page.sampling.max_new_tokens = 8
    for name, value in changes.items():
        *sections, key = name.split("__")
        table = page
        for section in sections:
            table = table[section]
        table[key] = value
    return from_config_dict(page)


def on_devices(monkeypatch, count):
    """Runs see so many of the fake devices."""
    some = functools.partial(make_mesh, devices=jax.devices()[:count])
    monkeypatch.setattr(sharding, "make_mesh", some)


def on_one_device(monkeypatch):
    on_devices(monkeypatch, 1)


make_mesh = sharding.make_mesh


def mesh(**sizes):
    settings = MeshSettings(**{"data": 1, "fsdp": 1, **sizes})
    count = int(np.prod([settings.data, settings.fsdp, settings.tensor, settings.expert]))
    return sharding.make_mesh(settings, jax.devices()[:count])


def model(config=TINY, seed=0) -> Transformer:
    """Random weights far from their initial values, so that distributions are peaked and every parameter matters; no compilation."""
    abstract = jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0)))
    generator = np.random.default_rng(seed)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        noise = generator.normal(size=leaf.shape)
        scale = 0.5 if "embedding" in name or "head" in name else 0.1
        values = 1 + 0.2 * noise if "norm" in name else 0.2 * noise if "bias" in name else scale * noise
        return jnp.asarray(values.astype(np.float32))

    return jax.tree_util.tree_map_with_path(fill, abstract)


log_probs_fn = programs.response_log_probs


def pack(batch, *, prompt, groups=None, group_size=1, **options):
    """The mini-batch as an update takes it."""
    rows, response = batch.loss_mask.shape
    groups = groups or rows // group_size
    layout = Layout.of(prompts=groups, group_size=group_size, prompt=prompt, response=response, **options)
    return packing.pack(batch, layout)


def batch_of(tokens, padding_mask, width, expert_ids=None) -> Batch:
    """Rows of which every response token trains."""
    mask = np.asarray(padding_mask)[:, -width:].astype(bool)
    zeros = np.zeros(mask.shape, np.float32)
    return Batch(
        np.asarray(tokens),
        np.asarray(padding_mask),
        mask,
        mask / np.float32(mask.sum()),
        zeros[:, 0],
        zeros,
        zeros,
        expert_ids,
    )


def packed_log_probs(model, tokens, padding_mask, width, *, group_size, expert_ids=None, score=None, **options):
    """The trainer's log-probs [B, T] of rows, packed."""
    batch = batch_of(tokens, padding_mask, width, expert_ids)
    rows, places = pack(batch, prompt=batch.tokens.shape[1] - width, group_size=group_size)
    score = score or make_score_step(functools.partial(log_probs_fn, **options))
    return places.unpack(np.asarray(score(model, rows)), np.zeros(batch.loss_mask.shape, np.float32))


def plain_log_probs(model, tokens, padding_mask, width, *, temperature=1.0, dtype=jnp.float32):
    """The same by the book: every row whole, through `hidden_states`, shifted by one."""
    hidden = models.hidden_states(model, tokens, padding_mask, dtype=dtype).hidden_BTD[:, -width - 1 : -1]
    return fused_token_log_probs(hidden, models.head_matrix(model), tokens[:, -width:], temperature=temperature)


def rows_of(rollout):
    return (
        np.concatenate([rollout.prompt_tokens, rollout.response_tokens], axis=1),
        np.concatenate([rollout.prompt_mask, rollout.response_mask], axis=1),
    )


def build(settings, **arguments):
    return building.build(settings, **{"dataset": SUMS, **arguments})
