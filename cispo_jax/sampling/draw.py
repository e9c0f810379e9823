"""One more token of every response: what it is drawn from, with which randomness, and what ends a response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cispo_jax.types import FINISH_REASONS

RUNNING = -1
STOP, LENGTH, REPETITION = map(FINISH_REASONS.index, ("stop", "length", "repetition"))
CERTAIN = 0.99  # a token of a higher probability counts for the repetition stop (MiniMax-M1, section 4.2)


class Rules(NamedTuple):
    """What tokens are drawn from and what ends a response; values, so that none of them asks for a compilation."""

    temperature: np.float32
    eos_ids: np.ndarray  # int32 [n]
    max_new_tokens: np.int32  # T
    repetition_stop: np.int32  # R, 0 = off
    seed: np.uint32
    step: np.uint32

    @staticmethod
    def of(
        *,
        eos_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        repetition_stop: int = 0,
        seed: int = 0,
        step: int = 0,
    ) -> Rules:
        """With the types that a program is compiled for; a temperature of 0 (greedy) is 1 in the record."""
        return Rules(
            temperature=np.float32(temperature or 1.0),
            eos_ids=np.asarray(sorted(set(eos_ids)), np.int32),
            max_new_tokens=np.int32(max_new_tokens),
            repetition_stop=np.int32(repetition_stop),
            seed=np.uint32(seed % 2**32),
            step=np.uint32(step),
        )


class Choice(NamedTuple):
    """How a token is chosen; static."""

    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0


class Rows(NamedTuple):
    """Where each of B responses stands."""

    token_B: jax.Array  # int32, the newest token, which is fed next
    position_B: jax.Array  # int32, its rotary position
    count_B: jax.Array  # int32, tokens sampled
    streak_B: jax.Array  # int32, of them the last ones in a row that were certain
    reason_B: jax.Array  # int8, index into FINISH_REASONS or RUNNING

    @staticmethod
    def start(token_B: jax.Array, position_B: jax.Array) -> Rows:
        """Nothing sampled yet: `token_B` is the last token of the prompt."""
        zeros_B = jnp.zeros(len(token_B), jnp.int32)
        return Rows(token_B, position_B, zeros_B, zeros_B, jnp.full(len(token_B), RUNNING, jnp.int8))

    def extend(
        self, logits_BV: jax.Array, keys_B: jax.Array, rules: Rules, choice: Choice
    ) -> tuple[Rows, tuple[jax.Array, jax.Array, jax.Array]]:
        """Draws the next token of every row that is running; then what was drawn: tokens, which rows ran, log-probs (0 where not)."""
        logits_BV = logits_BV / rules.temperature
        token_B = choose(logits_BV, keys_B, self.count_B, *choice)
        log_prob_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
        log_prob_B = log_prob_B - jax.nn.logsumexp(logits_BV, axis=-1)
        count_B = self.count_B + 1
        streak_B = jnp.where(log_prob_B > math.log(CERTAIN), self.streak_B + 1, 0)
        repeats_B = (rules.repetition_stop > 0) & (streak_B >= rules.repetition_stop)
        reason_B = jnp.where(count_B >= rules.max_new_tokens, LENGTH, RUNNING)
        reason_B = jnp.where(jnp.isin(token_B, rules.eos_ids), STOP, jnp.where(repeats_B, REPETITION, reason_B))
        rows = Rows(token_B, self.position_B + 1, count_B, streak_B, reason_B.astype(jnp.int8))
        running_B = self.reason_B == RUNNING
        rows = jax.tree.map(lambda new, old: jnp.where(running_B, new, old), rows, self)
        return rows, (jnp.where(running_B, token_B, 0), running_B, jnp.where(running_B, log_prob_B, 0))


def row_keys(seed, step, prompt_ids_B: jax.Array, samples_B: jax.Array) -> jax.Array:
    """One key a row from (seed, step, prompt id, sample): this is where a sample's randomness comes from."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(key, prompt), sample))(
        prompt_ids_B, samples_B
    )


def choose(logits_BV, keys_B, count_B, greedy: bool, top_p: float, top_k: int) -> jax.Array:
    """One token a row: the likeliest, or drawn from softmax(logits) by the key folded with the number of tokens before it."""
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
    return jax.vmap(lambda key, t, logits_V: draw_token(jax.random.fold_in(key, t), logits_V))(
        keys_B, count_B, logits_BV
    )


def draw_token(key: jax.Array, logits_V: jax.Array) -> jax.Array:
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
