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
from cispo_jax.sampling import slots as continuous
from cispo_jax.sampling.draw import RUNNING, Choice, Rows, Rules, row_keys
from cispo_jax.types import Progress, Rollout


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
    repetition_stop: int = 0,
    limit: int | None = None,
    slots: int = 0,
    sync_tokens: int = 64,
    on_sync: Callable[[Progress], None] | None = None,
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
      repetition_stop: R; a response ends after R tokens in a row that each had a probability above 0.99 (MiniMax-M1). 0 = off.
      limit: a lower limit than max_new_tokens, of this call; nothing is compiled anew for another one.
      slots: responses that decode at a time, a multiple of the devices that split rows; one that ends makes room for the next
        (`sampling.slots`). 0: all P x G, in one program that ends with the longest.
      sync_tokens: with slots, how many tokens at most between two looks of the host at them.
      on_sync: with slots, called at each look with what there is.
      shard_rows: puts a host array of P rows on the device(s).

    Returns:
      A `Rollout` in host memory, rows prompt-major; with several processes whole on each of them.

    Raises:
      ConfigError: a cache that would overflow, an empty prompt, a prompt longer than prompt_width or with ids that the model has not,
        prompt_ids of another length, T < 1, G < 1, a temperature, top_p, top_k, repetition_stop, slots or sync_tokens that cannot be.
    """
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ConfigError("prompts must be a non-empty list of non-empty lists of token ids.")
    longest = max(len(prompt) for prompt in prompts)
    width = longest if prompt_width is None else prompt_width
    if max_new_tokens < 1 or group_size < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} and group_size={group_size} must be at least 1.")
    if limit is not None and not 1 <= limit <= max_new_tokens:
        raise ConfigError(f"limit={limit} must be 1 to max_new_tokens={max_new_tokens}.")
    if repetition_stop < 0 or slots < 0 or sync_tokens < 1:
        raise ConfigError(
            f"repetition_stop={repetition_stop}, slots={slots}, sync_tokens={sync_tokens}: repetition_stop >= 0, slots >= 0 (0 = off) "
            "and sync_tokens >= 1 are valid."
        )
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
    rules = Rules.of(
        temperature=temperature,
        eos_ids=eos_ids,
        max_new_tokens=max_new_tokens if limit is None else limit,
        repetition_stop=repetition_stop,
        seed=seed,
        step=step,
    )
    common = {
        "group_size": group_size,
        "max_new_tokens": max_new_tokens,
        "dtype": jnp.dtype(dtype).name,
        "record": record_experts,
    }
    common["choice"] = Choice(temperature == 0, top_p, top_k)
    prompts_P = (tokens_PS, mask_PS, (ids_P % 2**32).astype(np.uint32))
    if slots:
        sampled = continuous.sample(
            model,
            *prompts_P,
            rules,
            slots=slots,
            sync_tokens=sync_tokens,
            on_sync=on_sync,
            shard_rows=shard_rows,
            **common,
        )
    else:
        sampled = jax.tree.map(to_host, _sample(model, *map(shard_rows, prompts_P), rules, **common))
    response_tokens, response_mask, log_probs, reasons, expert_ids = sampled
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
        finish_reason=reasons,
        expert_ids=expert_ids,
    )


@functools.partial(jax.jit, static_argnames=("group_size", "max_new_tokens", "choice", "dtype", "record"))
def _sample(model, tokens_PS, mask_PS, ids_P, rules, *, group_size, max_new_tokens, choice, dtype, record=False):
    """Prefill of P prompts, then one loop over the P x G rows.

    Returns tokens, mask and log-probs [B, T], the finish reasons [B], and the experts of every token [B, S+T, L, K] or None.
    """
    (P, S), T = tokens_PS.shape, max_new_tokens
    B = P * group_size
    dtype = jnp.dtype(dtype)
    head = model.head_matrix()
    with jax.named_scope("prefill"):
        options = {"record": True} if record else {}
        hidden_BD, cache = model.prefill(tokens_PS, mask_PS, copies=group_size, room=T, dtype=dtype, **options)
    first = getattr(cache, "num_columns", S + T) - T  # column of a response's first token
    repeat = lambda x_P: jnp.repeat(x_P, group_size)
    keys_B = row_keys(rules.seed, rules.step, repeat(ids_P), jnp.tile(jnp.arange(group_size), P))

    def draw(t, rows, hidden_BD, response):
        """Draws token t of every row and writes it, its mask and its log-prob into the response arrays."""
        rows, drawn = rows.extend(head_logits(hidden_BD, head), keys_B, rules, choice)
        write = lambda x_BT, x_B: jax.lax.dynamic_update_slice(x_BT, x_B[:, None], (0, t))
        return rows, tuple(map(write, response, drawn))

    def one_token(carry):
        t, rows, response, cache = carry
        hidden_BD, cache = model.decode_step(rows.token_B, rows.position_B, cache, first + t - 1, dtype=dtype)
        return t + 1, *draw(t, rows, hidden_BD, response), cache

    response = tuple(jnp.zeros((B, T), x) for x in (jnp.int32, bool, jnp.float32))
    rows, response = draw(0, Rows.start(repeat(tokens_PS[:, -1]), repeat(mask_PS.sum(axis=1)) - 1), hidden_BD, response)
    with jax.named_scope("decode"):
        carry = (jnp.int32(1), rows, response, cache)
        carry = jax.lax.while_loop(lambda c: (c[0] < T) & jnp.any(c[1].reason_B == RUNNING), one_token, carry)
    _, rows, response, cache = carry
    return *response, rows.reason_B, cache.expert_ids_BSLK if record else None
