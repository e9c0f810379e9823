"""Masked sums and means: which tokens count, per response, per prompt, and how sums from several places add up.

Every function selects with `where` before it does arithmetic, so what lies under the mask (NaN, inf, garbage) reaches neither a
value nor a gradient. Results that are to be averaged travel as (sum, count) pairs until the last line.
"""

from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.lax import stop_gradient
from jax.typing import ArrayLike

AGGREGATIONS = ("token", "prompt", "sequence", "constant", "none")
Sums = dict[str, tuple[Array, Array]]  # name -> (sum, count); where the name ends in "_max", (maximum, count)


def counted(loss_mask: ArrayLike, segment_ids: ArrayLike | None = None) -> Array:
    """The tokens that count, as bool: `loss_mask` (bool, or numbers where 0 means no), less the pads of packed rows (segment 0)."""
    mask = jnp.asarray(loss_mask).astype(bool)
    return mask if segment_ids is None else mask & narrow(segment_ids).astype(bool)


def select(mask: Array, x: ArrayLike) -> Array:
    """A constant input ([B] or [B, T]) as float32 [B, T], 0 where it does not count: 0 * NaN would be NaN."""
    x = stop_gradient(jnp.asarray(x))
    return jnp.where(mask, x[:, None] if x.ndim < mask.ndim else x, 0).astype(jnp.float32)


def masked_sum(x: Array, mask: Array) -> Array:
    """Sum of `x` where `mask` is true, in float32."""
    return jnp.sum(jnp.where(mask, x.astype(jnp.float32), 0))


def masked_count(mask: Array) -> Array:
    """Number of true entries as float32, counted in integers (float32 addition stops at 2**24)."""
    return jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)


def masked_mean(x: Array, mask: Array) -> Array:
    """Mean of `x` where `mask` is true; 0 if it is true nowhere."""
    return masked_sum(x, mask) / jnp.maximum(masked_count(mask), 1)


def masked_max(x: Array, mask: Array) -> Array:
    """Maximum of `x` where `mask` is true; 0 if it is true nowhere."""
    maximum = jnp.max(x, where=mask, initial=-jnp.inf)
    return jnp.where(jnp.any(mask), maximum, 0).astype(jnp.float32)


def masked_quantile(x: Array, mask: Array, q: float) -> Array:
    """The `q` quantile (linear interpolation) of `x` where `mask` is true; 0 if it is true nowhere."""
    if x.size == 0:
        return jnp.float32(0)
    ordered = jnp.sort(jnp.where(mask, x, jnp.inf).ravel())
    position = q * jnp.maximum(masked_count(mask) - 1, 0)
    below = jnp.floor(position)
    low, high = (ordered[jnp.minimum(i.astype(jnp.int32), ordered.size - 1)] for i in (below, below + 1))
    share = position - below
    return jnp.where(jnp.any(mask), jnp.where(share > 0, low + share * (high - low), low), 0).astype(jnp.float32)


def dense_ids(ids: ArrayLike) -> Array:
    """Replaces arbitrary integers by 0, 1, ... (the same shape, equal exactly where `ids` are), so that they can index sums.

    Host arrays are ranked on the host: their 64-bit ids would wrap around in jax's 32 bits.
    """
    if isinstance(ids, jax.Array):
        return jnp.unique(ids.ravel(), return_inverse=True, size=ids.size)[1].reshape(ids.shape).astype(jnp.int32)
    ids = np.asarray(ids)
    return jnp.asarray(np.unique(ids.ravel(), return_inverse=True)[1].reshape(ids.shape), jnp.int32)


def narrow(segment_ids: ArrayLike) -> Array:
    """Segment ids as a jax array, 0 still 0. Host arrays are renumbered on the host: 2**32 would wrap to 0 in jax's 32 bits."""
    if isinstance(segment_ids, jax.Array):
        return segment_ids
    ids = np.asarray(segment_ids)
    return jnp.asarray(
        np.where(ids == 0, 0, np.unique(ids.ravel(), return_inverse=True)[1].reshape(ids.shape) + 1), jnp.int32
    )


def is_real(x: ArrayLike) -> bool:
    """Whether `x` is a real number or an array of them; not a bool, text, None or a nested list."""
    return not isinstance(x, list | tuple) and any(
        jnp.issubdtype(np.asarray(x).dtype, kind) for kind in (jnp.floating, jnp.integer)
    )


def response_ids(shape: tuple[int, ...], segment_ids: ArrayLike | None) -> Array:
    """Which response a token belongs to: [B] dense ids, one a row, or [B, T], one a (row, segment) of packed rows."""
    rows = jnp.arange(shape[0], dtype=jnp.int32)
    if segment_ids is None or 0 in shape:
        return rows
    # Ranked row by row (a segment id means something only inside its row), then moved apart by T, the most a row can hold.
    return jax.vmap(dense_ids)(narrow(segment_ids)) + shape[1] * rows[:, None]


def unit_sum(x: Array, ids: Array) -> tuple[Array, Array]:
    """Sums `x` [B, T] inside each unit (response or prompt) of dense `ids` [B] or [B, T].

    Returns:
      At each token the sum over its unit ([B, 1] for [B] ids, else [B, T]), and the sums by unit (as many as there are ids).
    """
    if x.size == 0:
        return x, jnp.zeros(0, x.dtype)
    per_id = x.sum(axis=-1) if ids.ndim == 1 else x
    sums = jax.ops.segment_sum(per_id.ravel(), ids.ravel(), num_segments=ids.size)
    per_token = sums[ids]
    return (per_token[:, None] if ids.ndim == 1 else per_token), sums


def response_mean(x: Array, mask: Array, segment_ids: ArrayLike | None) -> Array:
    """At each token of [B, T] the mean of `x` over the counted tokens of its response."""
    ids = response_ids(x.shape, segment_ids)
    sums, _ = unit_sum(jnp.where(mask, x, 0), ids)
    counts, _ = unit_sum(mask.astype(jnp.int32), ids)
    return jnp.broadcast_to(sums / jnp.maximum(counts, 1).astype(x.dtype), x.shape)


class Reduction(NamedTuple):
    """How [B, T] token terms become one number: the arguments of a loss that decide it (`cispo_jax.objectives` explains them)."""

    aggregation: str | ArrayLike
    group_ids: ArrayLike | None = None
    segment_ids: ArrayLike | None = None
    normalizer: ArrayLike | None = None

    def coefficients(self, mask: Array) -> tuple[Array, Array]:
        """The coefficient of each token before division [B, T], and the count to divide by."""
        if not isinstance(self.aggregation, str):
            coefficients = select(mask, self.aggregation)
            return coefficients, coefficients.sum()
        if self.aggregation == "prompt" and self.group_ids is not None:
            ids = dense_ids(self.group_ids)
        elif self.aggregation == "sequence":
            ids = response_ids(mask.shape, self.segment_ids)
        else:
            return mask.astype(jnp.float32), masked_count(mask)
        in_unit, by_unit = unit_sum(mask.astype(jnp.int32), ids)
        return jnp.where(mask, 1 / jnp.maximum(in_unit, 1).astype(jnp.float32), 0), masked_count(by_unit > 0)

    def weights(self, mask: Array) -> Array:
        """The coefficient of each token [B, T], divided; all 0 where nothing counts."""
        coefficients, count = self.coefficients(mask)
        if self.normalizer is not None:
            count = stop_gradient(jnp.asarray(self.normalizer, jnp.float32))
        elif not isinstance(self.aggregation, str):
            return coefficients
        return jnp.where(count == 0, 0, coefficients / jnp.where(count == 0, 1, count))

    def reduce(self, values: Array, mask: Array) -> Array:
        if isinstance(self.aggregation, str) and self.aggregation == "none":
            return values
        return jnp.sum(values * self.weights(mask))  # divided before the sum, where thousands of exp(80) would overflow

    def checked(self, shape: tuple[int, ...]) -> "Reduction":
        """Itself; raises ValueError, naming the argument, where it makes no sense for arrays of `shape`."""
        kind = None
        if not isinstance(self.aggregation, str):
            check_arrays(shape, aggregation=self.aggregation)
        elif (kind := self.aggregation) not in AGGREGATIONS:
            raise ValueError(f"aggregation={kind!r}; valid: {', '.join(AGGREGATIONS)}, a [B, T] array of coefficients")
        if kind == "prompt" and self.group_ids is None:
            raise ValueError("aggregation='prompt' needs group_ids: [B] or [B, T] integers, which prompt a token is of")
        if kind == "constant" and self.normalizer is None:
            raise ValueError("aggregation='constant' needs normalizer: the number to divide the sum by")
        if kind == "none" and self.normalizer is not None:
            raise ValueError("aggregation='none' reduces nothing, so normalizer has no effect: leave it out")
        check_arrays(shape, group_ids=self.group_ids, segment_ids=self.segment_ids)
        for name in ("group_ids", "segment_ids"):
            ids = getattr(self, name)
            dtype = ids.dtype if isinstance(ids, jax.Array) else np.asarray(0 if ids is None else ids).dtype
            if not jnp.issubdtype(dtype, jnp.integer):
                raise ValueError(f"{name} must be integers, got {dtype}")
        divisor = 1 if self.normalizer is None else self.normalizer
        known = not isinstance(divisor, Tracer)
        if np.ndim(divisor) or (known and not (is_real(divisor) and np.asarray(divisor) >= 0)):
            raise ValueError(
                f"normalizer is {self.normalizer!r}; valid: one number >= 0 (0: nothing counts, the loss is 0)"
            )
        return self


def check_arrays(shape: tuple[int, ...], **arrays: ArrayLike | None) -> None:
    """Refuses arrays that are not [B, T] = `shape`; advantages and group_ids may be [B]; some may be None."""
    if len(shape) != 2:
        raise ValueError(f"log_probs and the other arrays must be [B, T], got shape {shape}")
    for name, x in arrays.items():
        if x is None and name not in ("group_ids", "segment_ids", "token_weights"):
            raise ValueError(f"{name} is None; it must be an array, [B, T] like the other arrays, {shape}")
        if x is not None:
            x = x if isinstance(x, jax.Array) else np.asarray(x)
            rows = name in ("advantages", "group_ids")
            message = f"{name} must be {'[B] or ' * rows}[B, T] like the other arrays, {shape}"
            expected = shape[:1] if rows and x.ndim == 1 else shape
            chex.assert_shape(x, expected, custom_message=message, exception_type=ValueError)


def add_sums(a: Sums, b: Sums) -> Sums:
    """Pools two dicts of (sum, count) pairs, e.g. of two micro-batches or updates; `_max` entries keep the larger."""
    if a.keys() != b.keys():
        raise ValueError(f"cannot pool different metrics: only one side has {sorted(a.keys() ^ b.keys())}")
    return {
        k: ((jnp.maximum if k.endswith("_max") else jnp.add)(a[k][0], b[k][0]), jnp.add(a[k][1], b[k][1])) for k in a
    }


def means(sums: Mapping[str, tuple[Array, Array]]) -> dict[str, Array]:
    """The last line: sum / count of each pair (0 where nothing was counted), the maximum itself for `_max` names."""
    return {
        k: total if k.endswith("_max") else total / jnp.where(count == 0, 1, count)
        for k, (total, count) in sums.items()
    }
