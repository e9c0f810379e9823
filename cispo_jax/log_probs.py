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
    hidden: Array, head: Array, tokens: ArrayLike, *, temperature: ArrayLike = 1.0, chunk_size: int = 256
) -> tuple[Array, Array]:
    """`token_log_probs` and the entropy straight from the last hidden states, holding `chunk_size` x V logits at a time.

    With p = softmax(hidden head / temperature): log p[token] and -sum p log p. The backward pass computes the logits again. Both
    outputs are differentiable with respect to `hidden` and `head`, not `temperature`; first derivatives only. If both are bfloat16,
    the products of the backward pass take bfloat16 inputs too (sums stay float32).

    Args:
      hidden: [..., D] float; position t predicts `tokens` at t (nothing is shifted inside).
      head: [D, V] float (a tied embedding transposed, say).
      tokens: [...] integers in [0, V).
      temperature: > 0, the one the tokens were sampled at.
      chunk_size: tokens whose logits are held at a time. Under a mesh, over all devices together: scale it with their number.

    Returns:
      log-probs [...] and entropy [...] (in nats), float32.

    Raises:
      ValueError: shapes that do not fit, a temperature or chunk size that is not positive.
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
    size = tokens.size
    if size == 0:
        return jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(tokens.shape, jnp.float32)
    chunk_size = min(chunk_size, size)
    padding = -size % chunk_size
    flat = jnp.pad(hidden.reshape(size, -1), ((0, padding), (0, 0)))
    temperature = jnp.asarray(temperature, jnp.float32)
    outputs = _fused(chunk_size, flat, head, jnp.pad(tokens.ravel(), (0, padding)), temperature)
    log_probs, entropy = (x[:size].reshape(tokens.shape) for x in outputs)
    return log_probs, entropy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(chunk_size: int, hidden: Array, head: Array, tokens: Array, temperature: Array) -> tuple[Array, Array]:
    return _fused_forward(chunk_size, hidden, head, tokens, temperature)[0]


def _fused_forward(chunk_size: int, hidden: Array, head: Array, tokens: Array, temperature: Array):
    def chunk(_, inputs):
        hidden, tokens = inputs
        logits = head_logits(hidden, head) / temperature
        maximum = logits.max(axis=-1, keepdims=True)
        # From the logits: were it taken from `shifted`, XLA would write that out as one more [chunk, V] array (CPU: a third slower).
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - maximum[:, 0]
        shifted = logits - maximum
        exp = jnp.exp(shifted)
        total = exp.sum(axis=-1)
        log_total = jnp.log(total)
        entropy = log_total - (exp * shifted).sum(axis=-1) / total
        return None, (chosen - log_total, entropy, maximum[:, 0], log_total)

    with jax.named_scope("fused_log_probs"):
        _, outputs = jax.lax.scan(chunk, None, (_split(hidden, chunk_size), _split(tokens, chunk_size)))
    log_probs, entropy, maximum, log_total = map(_join, outputs)
    return (log_probs, entropy), (hidden, head, tokens, temperature, entropy, maximum, log_total)


def _fused_backward(chunk_size: int, residuals, cotangents):
    # In blocks of the vocabulary over all tokens, as large as a chunk's logits: each block's share of the head's gradient is then
    # final. In chunks of tokens it would be added up [D, V] at every chunk, under a mesh even summed over the devices every time.
    hidden, head, tokens, temperature, *columns = residuals
    dtype = jnp.bfloat16 if hidden.dtype == head.dtype == jnp.bfloat16 else jnp.float32
    vocab_size = head.shape[1]
    width = -(-vocab_size // (hidden.shape[0] // chunk_size))
    width += -width % 128 if width > 128 else 0  # whole registers of a TPU
    blocks = -(-vocab_size // width)
    tokens, entropy, maximum, log_total, d_log_prob, d_entropy = (x[:, None] for x in (tokens, *columns, *cotangents))

    def block(hidden_gradient, inputs):
        index, head = inputs
        log_p = head_logits(hidden, head) / temperature - maximum - log_total
        column = jax.lax.broadcasted_iota(tokens.dtype, log_p.shape, 1) * blocks + index
        d_logits = jnp.where(column == tokens, d_log_prob, 0)
        d_logits = d_logits - jnp.exp(log_p) * (d_log_prob + d_entropy * (log_p + entropy))
        # Columns from V on only fill up the blocks.
        d_logits = (jnp.where(column < vocab_size, d_logits, 0) / temperature).astype(dtype)
        return hidden_gradient + head_logits(d_logits, head.T), head_logits(hidden.T, d_logits)

    with jax.named_scope("fused_log_probs_backward"):
        padded = jnp.pad(head.T, ((0, blocks * width - vocab_size), (0, 0)))
        inputs = jnp.arange(blocks, dtype=tokens.dtype), _split(padded, width).swapaxes(1, 2)
        zeros = _vary(jnp.zeros(hidden.shape, jnp.float32), _axes(hidden, head, *columns, *cotangents))
        hidden_gradient, head_gradient = jax.lax.scan(block, zeros, inputs)
        head_gradient = _join(head_gradient.swapaxes(1, 2))[:vocab_size].T
    return (
        _like(hidden_gradient, hidden),
        _like(head_gradient, head),
        np.zeros(tokens.shape[:1], jax.dtypes.float0),
        _vary(jnp.zeros_like(temperature), _axes(temperature)),
    )


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


def _split(x: Array, chunk_size: int) -> Array:
    """[N, ...] -> [chunks, chunk_size, ...], strided: a chunk then holds rows of every device when N is split over a mesh."""
    return jnp.moveaxis(x.reshape(chunk_size, -1, *x.shape[1:]), 1, 0)


def _join(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


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
