"""Masked sums and means: which tokens count, per response, per prompt, and how sums from several places add up.

Every function selects with `where` before it does arithmetic, so what lies under the mask (NaN, inf, garbage) reaches neither a
value nor a gradient. Results that are to be averaged travel as (sum, count) pairs until the last line.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Array = jax.Array
Sums = dict[str, tuple[Array, Array]]  # name -> (sum, count); where the name ends in "_max", (maximum, count)


def counted(loss_mask: ArrayLike, segment_ids: ArrayLike | None = None) -> Array:
    """The tokens that count, as bool: `loss_mask` (bool, or numbers where 0 means no), less the pads of packed rows (segment 0)."""
    mask = jnp.asarray(loss_mask) != 0
    return mask if segment_ids is None else mask & (jnp.asarray(segment_ids) != 0)


def masked_sum(x: Array, mask: Array) -> Array:
    """Sum of `x` where `mask` is true, in float32."""
    return jnp.sum(jnp.where(mask, x, 0), dtype=jnp.float32)


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
    below = jnp.floor(position).astype(jnp.int32)
    low, high = ordered[below], ordered[jnp.minimum(below + 1, ordered.size - 1)]
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


def response_ids(shape: tuple[int, int], segment_ids: ArrayLike | None) -> Array:
    """Which response a token belongs to: [B] dense ids, one a row, or [B, T], one a (row, segment) of packed rows."""
    rows = jnp.arange(shape[0], dtype=jnp.int32)
    if segment_ids is None or 0 in shape:
        return rows
    # Ranked row by row (a segment id means something only inside its row), then moved apart by T, the most a row can hold.
    return jax.vmap(dense_ids)(jnp.asarray(segment_ids)) + shape[1] * rows[:, None]


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


def add_sums(a: Sums, b: Sums) -> Sums:
    """Pools two dicts of (sum, count) pairs, e.g. of two micro-batches or updates; `_max` entries keep the larger."""
    if a.keys() != b.keys():
        raise ValueError(f"cannot pool different metrics: only one side has {sorted(a.keys() ^ b.keys())}")
    return {
        k: ((jnp.maximum if k.endswith("_max") else jnp.add)(a[k][0], b[k][0]), jnp.add(a[k][1], b[k][1])) for k in a
    }


def means(sums: Mapping[str, tuple[Array, Array]]) -> dict[str, Array]:
    """The last line: sum / count of each pair (0 where nothing was counted), the maximum itself for `_max` names."""
    return {k: total if k.endswith("_max") else total / jnp.where(count == 0, 1, count) for k, (total, count) in sums.items()}
