"""Paired timings: every round runs every variant once, so that a busy machine slows all of them; medians of ratios are what counts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

UNITS = ("wall", "cpu")
Seconds = dict[str, list[float]]  # "wall" and "cpu" -> seconds of each round


def seconds_of(function: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds until what it returns is there. A CPU second is one of a core."""
    start = time.perf_counter(), time.process_time()
    jax.block_until_ready(function())
    return {"wall": time.perf_counter() - start[0], "cpu": time.process_time() - start[1]}


def rounds_of(variants: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, Seconds]:
    """Seconds of each variant in each round; the first rounds compile and do not count."""
    found: dict[str, Seconds] = {name: {unit: [] for unit in UNITS} for name in variants}
    for index in range(rounds + warm_up):
        for name, run in variants.items():
            seconds = seconds_of(run)
            for unit in UNITS if index >= warm_up else ():
                found[name][unit].append(seconds[unit])
    return found


def median(seconds: Seconds) -> dict[str, float]:
    return {unit: statistics.median(seconds[unit]) for unit in UNITS}


def ratio(a: Seconds, b: Seconds) -> dict[str, float]:
    """The median over the rounds of a / b."""
    return {unit: statistics.median(x / y for x, y in zip(a[unit], b[unit], strict=True)) for unit in UNITS}


def matmul_rate(dtype: str, size: int = 2048, rounds: int = 5) -> float:
    """FLOP a wall second of a square matrix product: what a program of products could reach at best."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    return 2 * size**3 / min(rounds_of({"": lambda: product(x)}, rounds)[""]["wall"])


def copy_rate(mib: int = 256, rounds: int = 5) -> float:
    """Bytes a wall second through memory, read and written, of an array that is copied."""
    x = jnp.ones((mib * 2**18,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / min(rounds_of({"": lambda: copy(x)}, rounds)[""]["wall"])


class Compilations:
    """Programs compiled since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: Any, **__: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def write(path: str, figures: dict[str, Any]) -> None:
    """The figures with the device and the version, as JSON; nothing without a path."""
    if path:
        device = {"device": jax.devices()[0].device_kind, "devices": jax.device_count(), "jax": jax.__version__}
        with open(path, "w") as file:
            json.dump(device | figures, file, indent=2)
