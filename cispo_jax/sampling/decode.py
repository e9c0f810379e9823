"""Groups of responses by prefill and cached decoding, inside one jit.

Each prompt is prefilled once and its cache serves the G responses. One `lax.while_loop` decodes all rows, with no host transfer per
token and an early end when every row has stopped. The key of a token is a function of (seed, step, prompt id, sample, position),
never of the batch layout or the mesh, so the same response comes out of any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax.config import ConfigError
from cispo_jax.distributed import to_host
from cispo_jax.log_probs import head_logits
from cispo_jax.types import FINISH_REASONS, Rollout

STOP, LENGTH = FINISH_REASONS.index("stop"), FINISH_REASONS.index("length")


def sample_groups(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    eos_ids: Sequence[int],
    seed: int,
    step: int = 0,
    prompt_ids: Sequence[int] | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    prompt_width: int | None = None,
    max_tokens: int | None = None,
    pad_id: int = 0,
    dtype=jnp.float32,
    record_experts: bool = False,
    shard_rows: Callable[[np.ndarray], jax.Array] = jnp.asarray,
) -> Rollout:
    """G responses of each prompt, with the log-prob of every sampled token.

    Args:
      model: anything with `prefill`, `decode_step` and `head_matrix` (`cispo_jax.models.Transformer`), in the layout for sampling.
      prompts: P lists of token ids, none empty.
      group_size: G, responses of each prompt.
      max_new_tokens: T, the limit of a response, the EOS included.
      temperature: the logits are divided by it before sampling *and* before the recorded log-probs. 0 = greedy; then the
        log-probs are those at temperature 1.
      eos_ids: tokens that end a response; may be empty.
      seed, step, prompt_ids: what the randomness depends on, besides sample index and position; prompt_ids default to 0..P-1.
      top_p, top_k: sample only from the smallest set of tokens with that mass, from the k likeliest; for evaluation. The recorded
        log-probs stay those of the whole distribution.
      prompt_width: columns to pad prompts to (left); default the longest prompt. A fixed one avoids recompilation.
      max_tokens: cache columns that may be used; prompt_width + max_new_tokens above it is refused.
      record_experts: keep the experts that each token took in each layer (`Rollout.expert_ids`); for models that have some.
      shard_rows: puts a host array of P rows on the device(s).

    Returns:
      A `Rollout` in host memory, rows prompt-major; with several processes whole on each of them.

    Raises:
      ConfigError: a cache that would overflow, an empty prompt, a prompt longer than prompt_width or with ids that the model has not,
        prompt_ids of another length, T < 1, G < 1, a temperature, top_p or top_k that cannot be.
    """
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ConfigError("prompts must be a non-empty list of non-empty lists of token ids.")
    longest = max(len(prompt) for prompt in prompts)
    width = longest if prompt_width is None else prompt_width
    if max_new_tokens < 1 or group_size < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} and group_size={group_size} must be at least 1.")
    if not 0 <= temperature < np.inf or not 0 < top_p <= 1 or top_k < 0:
        raise ConfigError(
            f"temperature={temperature}, top_p={top_p}, top_k={top_k}: temperature >= 0 (0 = greedy), 0 < top_p <= 1 and "
            "top_k >= 0 (0 = off) are valid."
        )
    vocab_size = jax.eval_shape(model.head_matrix).shape[-1]
    for row, prompt in enumerate(prompts):
        # jax clamps an index that is out of range and goes on with another token.
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ConfigError(
                f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}: valid are 0 to {vocab_size - 1}."
            )
    if prompt_ids is not None and len(prompt_ids) != len(prompts):
        raise ConfigError(
            f"prompt_ids has {len(prompt_ids)} entries for {len(prompts)} prompts: one for each is needed."
        )
    if longest > width:
        raise ConfigError(f"a prompt of {longest} tokens does not fit prompt_width={width}.")
    if max_tokens is not None and width + max_new_tokens > max_tokens:
        raise ConfigError(
            f"the cache would overflow: prompt width {width} + max_new_tokens {max_new_tokens} > max_tokens {max_tokens}."
        )
    tokens_PS = np.full((len(prompts), width), pad_id, np.int32)
    mask_PS = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        tokens_PS[row, width - len(prompt) :] = prompt
        mask_PS[row, width - len(prompt) :] = True
    ids_P = np.arange(len(prompts)) if prompt_ids is None else np.asarray(prompt_ids)
    sampled = _sample(
        model,
        shard_rows(tokens_PS),
        shard_rows(mask_PS),
        shard_rows((ids_P % 2**32).astype(np.uint32)),
        np.asarray(sorted(set(eos_ids)), np.int32),
        np.uint32(seed % 2**32),
        np.uint32(step),
        np.float32(temperature or 1.0),
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        greedy=temperature == 0,
        top_p=top_p,
        top_k=top_k,
        dtype=jnp.dtype(dtype).name,
        record=record_experts,
    )
    response_tokens, response_mask, log_probs, expert_ids, stopped = jax.tree.map(to_host, sampled)
    if expert_ids is not None:
        # Neither pads were fed nor the last token of a response; the rows that had stopped were fed something.
        fed = np.pad(response_mask[:, 1:], ((0, 0), (0, 1)))
        fed = np.concatenate([np.repeat(mask_PS, group_size, axis=0), fed], axis=1)
        expert_ids = np.where(fed[:, :, None, None], expert_ids, -1)
    return Rollout(
        prompt_tokens=np.repeat(tokens_PS, group_size, axis=0),
        prompt_mask=np.repeat(mask_PS, group_size, axis=0),
        response_tokens=np.where(response_mask, response_tokens, pad_id),
        response_mask=response_mask,
        loss_mask=response_mask.copy(),
        log_probs=log_probs,
        finish_reason=np.where(stopped, STOP, LENGTH).astype(np.int8),
        expert_ids=expert_ids,
    )


@functools.partial(
    jax.jit, static_argnames=("group_size", "max_new_tokens", "greedy", "top_p", "top_k", "dtype", "record")
)
def _sample(
    model,
    tokens_PS,
    mask_PS,
    ids_P,
    eos_ids,
    seed,
    step,
    temperature,
    *,
    group_size,
    max_new_tokens,
    greedy,
    top_p,
    top_k,
    dtype,
    record=False,
):
    """Prefill of P prompts, then one loop over the P x G rows.

    Returns tokens, mask and log-probs [B, T], the experts of every token [B, S+T, L, K] or None, and whether a row stopped [B].
    """
    (P, S), T = tokens_PS.shape, max_new_tokens
    B = P * group_size
    dtype = jnp.dtype(dtype)
    head = model.head_matrix()
    with jax.named_scope("prefill"):
        options = {"record": True} if record else {}
        hidden_BD, cache = model.prefill(tokens_PS, mask_PS, copies=group_size, room=T, dtype=dtype, **options)
        logits_BV = head_logits(hidden_BD, head)
    lengths_B = jnp.repeat(mask_PS.sum(axis=1), group_size)
    keys_B = row_keys(seed, step, jnp.repeat(ids_P, group_size), jnp.tile(jnp.arange(group_size), P))

    def draw(t, logits_BV, done_B, response):
        """Draws token t of every row and writes it, its mask and its log-prob into the response arrays."""
        logits_BV = logits_BV / temperature
        token_B = _choose(logits_BV, keys_B, t, greedy=greedy, top_p=top_p, top_k=top_k)
        log_prob_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(
            logits_BV, axis=-1
        )
        new = (token_B, ~done_B, log_prob_B)
        write = lambda x_BT, x_B: jax.lax.dynamic_update_slice(
            x_BT, jnp.where(done_B, 0, x_B).astype(x_BT.dtype)[:, None], (0, t)
        )
        return token_B, done_B | jnp.isin(token_B, eos_ids), tuple(map(write, response, new))

    def one_token(carry):
        t, token_B, done_B, response, cache = carry
        hidden_BD, cache = model.decode_step(token_B, lengths_B + t - 1, cache, S + t - 1, dtype=dtype)
        token_B, done_B, response = draw(t, head_logits(hidden_BD, head), done_B, response)
        return t + 1, token_B, done_B, response, cache

    response = tuple(jnp.zeros((B, T), x) for x in (jnp.int32, bool, jnp.float32))
    token_B, done_B, response = draw(0, logits_BV, jnp.zeros(B, bool), response)
    with jax.named_scope("decode"):
        carry = (jnp.int32(1), token_B, done_B, response, cache)
        carry = jax.lax.while_loop(lambda c: (c[0] < T) & ~jnp.all(c[2]), one_token, carry)
    return *carry[3], carry[4].expert_ids_BSLK if record else None, carry[2]


def row_keys(seed: jax.Array, step: jax.Array, prompt_ids_B: jax.Array, samples_B: jax.Array) -> jax.Array:
    """One key a row from (seed, step, prompt id, sample): this is where a sample's randomness comes from."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(key, prompt), sample))(
        prompt_ids_B, samples_B
    )


def _choose(logits_BV, keys_B, t, *, greedy: bool, top_p: float, top_k: int) -> jax.Array:
    """One token a row: the likeliest, or drawn from softmax(logits) by the key folded with the position t."""
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if top_k:
        kth_B = jax.lax.top_k(logits_BV, min(top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= kth_B, logits_BV, -jnp.inf)
    if top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1)[:, ::-1]
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        kept_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV < top_p
        least_B = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B, logits_BV, -jnp.inf)
    return jax.vmap(lambda key, logits_V: _draw(jax.random.fold_in(key, t), logits_V))(keys_B, logits_BV)


def _draw(key: jax.Array, logits_V: jax.Array) -> jax.Array:
    """Inverse-CDF draw in two levels: a block of about sqrt(V) tokens, then a token in it, each by its own uniform.

    Two random numbers a token where Gumbel noise takes V: at V = 49,152 the noise cost twice the head's matrix product on CPU.
    Cumulative sums stay within about sqrt(V) terms, so float32 rounds probabilities at 1e-7 relative to a block, not to the whole.
    """
    V = len(logits_V)
    width = max(1, int(np.sqrt(V)))
    blocks = -(-V // width)
    padded_V = jnp.pad(logits_V, (0, blocks * width - V), constant_values=-jnp.inf)
    mass = jnp.exp(padded_V - jnp.max(logits_V)).reshape(blocks, width)
    block_key, token_key = jax.random.split(key)
    block = _pick(block_key, jnp.sum(mass, axis=1))
    return block * width + _pick(token_key, mass[block])


def _pick(key: jax.Array, mass: jax.Array) -> jax.Array:
    """An index drawn in proportion to non-negative masses; one of zero mass never comes out."""
    total = jnp.cumsum(mass)
    index = jnp.sum(total <= jax.random.uniform(key) * total[-1])
    return jnp.minimum(index, jnp.max(jnp.where(mass > 0, jnp.arange(len(mass)), 0))).astype(jnp.int32)
