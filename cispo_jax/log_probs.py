"""Log-probabilities of sampled tokens and the entropy of their distributions, from logits or fused with the output head.

The head's product is float32 for real on every device: TPUs and GPUs run a plain float32 product in bfloat16 or TF32, and a sampler
and a trainer that round differently drift apart (MiniMax-M1, section 3.2: without a float32 head the reward did not grow).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from cispo_jax.masked import is_real

ROWS = 4096  # of the vocabulary at most at a time
LOWEST = -1e30  # below every logit


def head_logits(hidden: Array, head: Array) -> Array:
    """Float32 logits [..., V] of `hidden` [..., D] and `head` [D, V], the one product for sampler and trainer.

    Two bfloat16 inputs are multiplied as they are and summed in float32; anything else is float32 at full precision.
    """
    if not hidden.dtype == head.dtype == jnp.bfloat16:
        hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
    return jnp.matmul(hidden, head, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def token_log_probs(logits: ArrayLike, tokens: ArrayLike, temperature: ArrayLike = 1.0) -> Array:
    """log softmax(logits / temperature) at the given tokens, in float32.

    Args:
      logits: [..., V] float; position t predicts `tokens` at t (nothing is shifted inside).
      tokens: [...] integers in [0, V).
      temperature: > 0, the one the tokens were sampled at.

    Returns:
      [...] float32.

    Raises:
      ValueError: shapes that do not fit, a temperature that is not positive.
    """
    _check(np.shape(logits)[:-1], tokens, temperature)
    logits = jnp.asarray(logits, jnp.float32) / jnp.asarray(temperature, jnp.float32)
    # The maximum leaves both terms first: logits of 10,000 and logsumexp would cancel to 3 digits.
    maximum = stop_gradient(logits.max(axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, jnp.asarray(tokens)[..., None], axis=-1)[..., 0] - maximum[..., 0]
    return chosen - jnp.log(jnp.exp(logits - maximum).sum(axis=-1))


def fused_token_log_probs(
    hidden: Array,
    head: Array,
    tokens: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    chunk_size: int = 256,
    head_shards: int = 1,
) -> tuple[Array, Array]:
    """`token_log_probs` and the entropy straight from the last hidden states, holding at most `chunk_size` x V logits at a time.

    With p = softmax(hidden head / temperature): log p[token] and -sum p log p. The backward pass computes the logits again. Both
    outputs are differentiable with respect to `hidden` and `head`, not `temperature`; first derivatives only. If both are bfloat16,
    the products of the backward pass take bfloat16 inputs too (sums stay float32).

    Args:
      hidden: [..., D] float; position t predicts `tokens` at t (nothing is shifted inside).
      head: [D, V] float. Of a transposed embedding, `embedding.T`, no copy is made.
      tokens: [...] integers in [0, V).
      temperature: > 0, the one the tokens were sampled at.
      head_shards: how many devices split V, so that each works on columns that it has.
      chunk_size: of how many tokens as many logits are held at a time. Under a mesh, over all devices together: scale it with their number.

    Returns:
      log-probs [...] and entropy [...] (in nats), float32.

    Raises:
      ValueError: shapes that do not fit, a temperature or chunk size that is not positive, shards that do not divide V.
    """
    hidden, head, tokens = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)
    if hidden.ndim < 1:
        raise ValueError("hidden must be [..., D], got a scalar")
    _check(hidden.shape[:-1], tokens, temperature)
    tokens = tokens.astype(jnp.int32)  # columns are counted in this type: uint8 would wrap at 256
    if head.ndim != 2 or head.shape[0] != hidden.shape[-1]:
        raise ValueError(f"head must be [D, V] with D = {hidden.shape[-1]} of hidden, got {head.shape}")
    if not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; valid: an integer > 0")
    if not isinstance(head_shards, int | np.integer) or head_shards < 1 or head.shape[1] % head_shards:
        raise ValueError(f"head_shards is {head_shards!r}; valid: an integer > 0 that divides V = {head.shape[1]}")
    size = tokens.size
    if size == 0:
        return jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(tokens.shape, jnp.float32)
    sizes = (min(chunk_size, size), head_shards)
    outputs = _fused(sizes, hidden.reshape(size, -1), head.T, tokens.ravel(), jnp.asarray(temperature, jnp.float32))
    log_probs, entropy = (x.reshape(tokens.shape) for x in outputs)
    return log_probs, entropy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(sizes, hidden: Array, table: Array, tokens: Array, temperature: Array) -> tuple[Array, Array]:
    """Of a head [V, D]: a tied embedding in its own layout, rows of which are cheap to take and to write.

    Rows of the head go by in blocks, over all tokens, so that each block's share of the head's gradient is final: in chunks of tokens it
    would be added up [V, D] at every chunk, under a mesh even summed over the devices every time.
    """
    return _fused_forward(sizes, hidden, table, tokens, temperature)[0]


def _fused_forward(sizes, hidden: Array, table: Array, tokens: Array, temperature: Array):
    def of_shard(table, tokens):
        """The largest logit, the sums of exp and of exp x logit below it, the logits of the tokens that are here; [N]."""
        width, count = _blocks(sizes[0], hidden, table)

        def add(i, carry):
            highest, total, weighted, chosen = carry
            rows, start, new = _block(table, i, width)
            logits = head_logits(hidden, rows.T) / temperature
            column = jnp.clip(tokens - start, 0, width - 1)
            here = (tokens == start + column) & (tokens >= i * width)
            chosen += jnp.where(here, jnp.take_along_axis(logits, column[:, None], axis=-1)[:, 0], 0)
            logits = jnp.where(new[None], logits, LOWEST)
            higher = jnp.maximum(highest, logits.max(axis=-1))
            scale, shifted = jnp.exp(highest - higher), logits - higher[:, None]
            exp = jnp.exp(shifted)
            weighted = scale * (weighted + total * (highest - higher)) + (exp * shifted).sum(axis=-1)
            return higher, total * scale + exp.sum(axis=-1), weighted, chosen

        zeros = _vary(jnp.zeros(len(hidden), jnp.float32), _axes(hidden, table, tokens, temperature))
        return jax.lax.fori_loop(0, count, add, (zeros + LOWEST, zeros, zeros, zeros))

    with jax.named_scope("fused_log_probs"):
        highest, total, weighted, chosen = _over_shards(sizes[1], of_shard, table, tokens)
        maximum = highest.max(axis=0)
        below = highest - maximum[None]
        weighted = (jnp.exp(below) * (weighted + total * below)).sum(axis=0)
        total = (jnp.exp(below) * total).sum(axis=0)
        log_total = jnp.log(total)
        log_probs, entropy = chosen.sum(axis=0) - maximum - log_total, log_total - weighted / total
    return (log_probs, entropy), (hidden, table, tokens, temperature, entropy, maximum, log_total)


def _fused_backward(sizes, residuals, cotangents):
    hidden, table, tokens, temperature, *columns = residuals
    dtype = jnp.bfloat16 if hidden.dtype == table.dtype == jnp.bfloat16 else jnp.float32
    entropy, maximum, log_total, d_log_prob, d_entropy = (x[:, None] for x in (*columns, *cotangents))

    def of_shard(table, tokens):
        width, count = _blocks(sizes[0], hidden, table)

        def block(i, gradients):
            hidden_gradient, table_gradient = gradients
            rows, start, new = _block(table, i, width)
            log_p = head_logits(hidden, rows.T) / temperature - maximum - log_total
            d_logits = jnp.where((start + jnp.arange(width))[None] == tokens[:, None], d_log_prob, 0)
            d_logits = d_logits - jnp.exp(log_p) * (d_log_prob + d_entropy * (log_p + entropy))
            d_logits = (d_logits / temperature).astype(dtype)
            of_rows = head_logits(d_logits.T, hidden)
            table_gradient = jax.lax.dynamic_update_slice_in_dim(table_gradient, of_rows, start, axis=0)
            return hidden_gradient + head_logits(jnp.where(new[None], d_logits, 0), rows), table_gradient

        axes = _axes(hidden, table, *columns, *cotangents)
        zeros = tuple(_vary(jnp.zeros(x.shape, jnp.float32), axes) for x in (hidden, table))
        return jax.lax.fori_loop(0, count, block, zeros)

    with jax.named_scope("fused_log_probs_backward"):
        hidden_gradient, table_gradient = _over_shards(sizes[1], of_shard, table, tokens)
    return (
        _like(hidden_gradient.sum(axis=0), hidden),
        _like(table_gradient.reshape(table.shape), table),
        np.zeros(tokens.shape, jax.dtypes.float0),
        _vary(jnp.zeros_like(temperature), _axes(temperature)),
    )


def _over_shards(shards: int, function, table: Array, tokens: Array) -> tuple[Array, ...]:
    """`function` of each shard's rows of the table, and of the tokens counted from its first; results have a leading axis of shards."""
    if shards == 1:  # without the axis: XLA for CPU reduces [1, N, width] three times slower than [N, width]
        return jax.tree.map(lambda x: x[None], function(table, tokens))
    first = jnp.arange(shards, dtype=tokens.dtype)[:, None] * (len(table) // shards)
    return jax.vmap(function)(table.reshape(shards, -1, table.shape[1]), tokens[None] - first)


def _blocks(chunk_size: int, hidden: Array, table: Array) -> tuple[int, int]:
    """Rows of a block, and how many blocks there are."""
    width = min(-(-len(table) * chunk_size // len(hidden)), ROWS)
    width = min(len(table), width + (-width % 128 if width > 128 else 0))  # whole registers of a TPU
    return width, -(-len(table) // width)


def _block(table: Array, i: Array, width: int) -> tuple[Array, Array, Array]:
    """Rows of the table, the first of them, and which were not in the block before: the last one goes back to where a whole one fits."""
    start = jnp.minimum(i * width, len(table) - width)
    return jax.lax.dynamic_slice_in_dim(table, start, width), start, start + jnp.arange(width) >= i * width


_fused.defvjp(_fused_forward, _fused_backward)


def _axes(*arrays: Array) -> frozenset[str]:
    """Inside `jax.shard_map`, the mesh axes along which the devices may hold different values (types say so from jax 0.10 on)."""
    types = [getattr(jax.typeof(x), "manual_axis_type", None) for x in arrays] if hasattr(jax, "typeof") else []
    return frozenset().union(*(getattr(x, "varying", ()) for x in types))


def _vary(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(axes - _axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _like(gradient: Array, primal: Array) -> Array:
    """The gradient in the type of its input; an input that the devices of a `shard_map` share gets the sum of theirs."""
    axes = tuple(_axes(gradient) - _axes(primal))
    return (jax.lax.psum(gradient, axes) if axes else gradient).astype(primal.dtype)


def _check(shape: tuple[int, ...], tokens: ArrayLike, temperature: ArrayLike) -> None:
    if np.shape(tokens) != shape:
        raise ValueError(f"tokens must have the leading shape {shape} of the other input, got {np.shape(tokens)}")
    if not jnp.issubdtype(jnp.asarray(tokens).dtype, jnp.integer):
        raise ValueError(f"tokens must be integers, got {jnp.asarray(tokens).dtype}")
    known = not isinstance(temperature, Tracer)
    if np.ndim(temperature) or (known and not (is_real(temperature) and np.asarray(temperature) > 0)):
        raise ValueError(
            f"temperature is {temperature!r}; valid: a number > 0 (greedy decoding has log-probs at temperature 1)"
        )
