"""Several processes as one run: who does what, what travels between them, how they end together.

Every process runs the same loop on the same host state, and arrays are split over the devices of all of them. Scoring is shared out
(`divide`), files are written by the main process (`main_only`). With one process nothing here does anything.
"""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import contextlib
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import numpy as np
from jax._src import clusters  # jax has no public name for the clusters that it detects ...
from jax._src.distributed import global_state  # ... nor for its barrier that needs no device
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cispo_jax.config import ConfigError

Params = ParamSpec("Params")
T = TypeVar("T")
CLUSTERS = ("gcetpu", "gketpu", "slurm", "ompi")
PIECE = 64 * 2**20  # bytes gathered at a time: every device holds a copy of them
_DAY = 24 * 3600 * 1000  # milliseconds; a process that has died ends the others much earlier


# ---- who is there


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the processes of this run: those of the flags, or of the cluster (TPU pod, SLURM, Open MPI); nothing if it is alone.

    Call it before any other use of jax. From then on an error in one process ends all of them, SIGTERM only asks (`stop_requests`), and a
    process that dies takes the others along: on CPU after 10 s, elsewhere after jax's 100 s.

    Raises:
      ConfigError: flags that do not belong together, or a coordinator that does not answer.
    """
    flags = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    _check(flags)
    if coordinator is None:
        if _cluster_size() == 1:
            return
    elif num_processes == 1:
        return
    # By the setting: asking jax for its backend would start it.
    on_cpu = (jax.config.jax_platforms or "").startswith("cpu")  # type: ignore[attr-defined]
    limits: dict[str, Any] = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 60} if on_cpu else {}
    # With flags every process sees all devices of its host; under SLURM and Open MPI jax gives each the GPU of its local rank.
    method = None if coordinator is None else "deactivate"
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, cluster_detection_method=method, **limits)
    except RuntimeError as error:
        where = f"--coordinator={coordinator}" if coordinator else "the cluster's coordinator"
        raise ConfigError(f"{where}: the processes did not find each other ({' '.join(str(error).split())}).") from None
    sys.excepthook = _end_all
    if on_cpu:
        # Only process 0 would find its programs there (jax's key depends on the process), and gloo gives the others 30 s to catch up.
        jax.config.update("jax_enable_compilation_cache", False)


def _check(flags: dict[str, Any]) -> None:
    given = [name for name, value in flags.items() if value is not None]
    if not given:
        return
    missing = [f"--{name}" for name in flags if name not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(f'--{name}={flags[name]}' for name in given)} without {', '.join(missing)}: give all three, "
            "--coordinator=HOST:PORT --num_processes=N --process_id=0 to N-1, or none where the cluster says it."
        )
    host, _, port = flags["coordinator"].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"--coordinator={flags['coordinator']}: HOST:PORT of process 0 is needed, with a port from 1 to 65535."
        )
    if flags["num_processes"] < 1:
        raise ConfigError(f"--num_processes={flags['num_processes']} must be at least 1.")
    if not 0 <= flags["process_id"] < flags["num_processes"]:
        raise ConfigError(
            f"--process_id={flags['process_id']} with --num_processes={flags['num_processes']}: valid are 0 to "
            f"{flags['num_processes'] - 1}."
        )


def _cluster_size() -> int:
    """How many processes the cluster's launcher has started; 1 where jax sees none of `CLUSTERS`."""
    found = (env for env in clusters.ClusterEnv._cluster_types if env.name in CLUSTERS and env.is_env_present())
    return next((env.get_process_count() for env in found), 1)


def num_processes() -> int:
    return global_state.num_processes


def is_main() -> bool:
    """Whether this is the process that prints and writes; starts no backend."""
    return global_state.process_id == 0


def main_only(function: Callable[Params, None]) -> Callable[Params, None]:
    """The function on the main process, nothing on the others."""

    @functools.wraps(function)
    def call(*args: Params.args, **options: Params.kwargs) -> None:
        if is_main():
            function(*args, **options)

    return call


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """The main process does the body first and the others find what it has made, where they share a disk."""
    if not is_main():
        barrier(name)
    try:
        yield
    finally:
        if is_main():
            barrier(name)


# ---- what travels


_barriers: dict[str, int] = {}


def barrier(name: str) -> None:
    """Returns once every process has called it as often with this name."""
    if num_processes() > 1:
        _barriers[name] = _barriers.get(name, 0) + 1
        _wait(f"{name} {_barriers[name]}", _DAY)


def _wait(name: str, milliseconds: int) -> None:
    client: Any = global_state.client
    client.wait_at_barrier(f"cispo_jax {name}", milliseconds)


def share(count: int) -> slice:
    """Which of `count` things this process does: disjoint over the processes, together all, nearly equally many."""
    i, N = global_state.process_id, num_processes()
    return slice(count * i // N, count * (i + 1) // N)


def divide(function: Callable[[slice], list[T]], count: int) -> list[T]:
    """`function(slice(0, count))`, each process doing its share and getting the results of all, in order."""
    mine = share(count)
    parts = gather(function(mine) if mine.stop > mine.start else [])
    return [value for part in parts for value in part]


def gather(value: T) -> list[T]:
    """The `value` of every process, in their order, on every process; anything that JSON can hold."""
    if num_processes() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([len(data)], np.int32))[:, 0]
    width = 1 << max(10, int(lengths.max() - 1).bit_length())  # few widths: one program is compiled for each
    padded = np.pad(data, (0, width - len(data)))
    step = min(width, PIECE)
    pieces = [multihost_utils.process_allgather(padded[i : i + step]) for i in range(0, width, step)]
    rows = np.concatenate(pieces, axis=1)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def to_host(x: Any) -> np.ndarray:
    """A device array in the memory of every process, gathered in pieces where its parts lie with other processes."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    assert isinstance(x.sharding, NamedSharding), x.sharding
    spec = (*x.sharding.spec, *[None] * x.ndim)[: x.ndim]
    # Along an axis that is whole on every device a piece is gathered without the rest.
    axis = max((i for i in range(x.ndim) if spec[i] is None), key=lambda i: x.shape[i], default=None)
    if axis is None:
        return np.asarray(_piece(x.sharding, 0, x.shape[0])(x, 0))
    step = max(1, min(x.shape[axis], PIECE * x.shape[axis] // max(x.nbytes, 1)))
    starts = [*range(0, x.shape[axis] - step, step), x.shape[axis] - step]  # one size: the last two may overlap
    result = np.empty(x.shape, x.dtype)
    for start in starts:
        into = (slice(None),) * axis + (slice(start, start + step),)
        result[into] = np.asarray(_piece(x.sharding, axis, step)(x, start))
    return result


@functools.cache
def _piece(sharding: NamedSharding, axis: int, size: int) -> Callable[[jax.Array, int], jax.Array]:
    cut = lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    return jax.jit(cut, out_shardings=NamedSharding(sharding.mesh, P()))


def from_host(x: Any, sharding: Sharding) -> jax.Array:
    """A host array, whole on every process, on devices of any process."""
    if num_processes() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    x = np.asarray(x)  # device_put would first compare it between all processes
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def settle(tree: T) -> T:
    """`tree`, waited for on CPU with several devices: jax 0.10 deadlocks there when steps are enqueued without waiting."""
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.block_until_ready(tree)
    return tree


def device_memory() -> int | None:
    """Bytes of the smallest device of the run; None where devices do not say, as CPUs."""
    mine = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    everywhere = [size for sizes in gather(mine) for size in sizes]
    known = [size for size in everywhere if size is not None]
    return min(known) if len(known) == len(everywhere) else None


# ---- how it ends


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Inside it SIGTERM does not end the process; the function says after which step to stop, the same on all processes.

    It must be called after every step. With several processes jax has taken the signal since `initialize`; the step that it agrees on is
    the one that the furthest process is in.
    """
    if num_processes() > 1:
        yield multihost_utils.reached_preemption_sync_point
    elif threading.current_thread() is not threading.main_thread():
        yield lambda step: False  # only the main thread may take signals
    else:
        received: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        try:
            yield lambda step: bool(received)
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def fail(message: str, code: int) -> NoReturn:
    """Ends this process after an error, and with it all: printed once where all see it, by the one that does otherwise."""
    if is_main():
        print(message, file=sys.stderr, flush=True)
    if num_processes() > 1:
        try:
            _wait("failed", 10_000)
        except Exception:  # the others are at work, or gone
            if not is_main():
                print(message, file=sys.stderr, flush=True)
            _exit(code)
    sys.exit(code)


def _end_all(kind: Any, error: Any, trace: Any) -> NoReturn:
    sys.__excepthook__(kind, error, trace)
    _exit(1)


def _exit(code: int) -> NoReturn:
    """At once: the usual way out waits for the other processes, which wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
