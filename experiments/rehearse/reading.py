"""Reads an exported model folder back and holds it against the checkpoint that it was made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax import models, weights
from cispo_jax.data.tokenizers import Tokenizer
from cispo_jax.training.checkpoint import Checkpoints
from experiments.rehearse.stages import Failed, Life


def compare(life: Life, architecture: models.TransformerConfig, tokenizer: Tokenizer, text: str) -> str:
    """What is the same: logits, of the checkpoint's weights in the dtype of the files, and the ids of `text`.

    Raises:
      Failed: something differs.
    """
    model, read = weights.load_pretrained(life.exported)
    abstract = jax.eval_shape(lambda: models.Transformer(architecture, key=jax.random.key(0)))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = Checkpoints(life.run / "checkpoints", keep=life.config.checkpoint.keep)
    kept = checkpoints.restore_model(life.config.num_steps, abstract, jax.tree.map(lambda _: here, abstract))
    checkpoints.close()
    kept = jax.tree.map(lambda x: x.astype(read.file_dtype).astype(x.dtype), kept)
    tokens = jnp.arange(16).reshape(2, 8) % architecture.vocab_size
    mine, theirs = (np.asarray(models.forward(m, tokens)) for m in (kept, model))
    if not (np.isfinite(mine).all() and np.array_equal(mine, theirs)):
        raise Failed(f"logits of {life.exported} differ from the checkpoint's by {np.max(np.abs(mine - theirs))}")
    if weights.load_tokenizer(life.exported).encode(text) != tokenizer.encode(text):
        raise Failed(f"the tokenizer of {life.exported} gives other ids for {text!r}")
    return f"{read.file_dtype}; logits and tokens are those of the checkpoint"
