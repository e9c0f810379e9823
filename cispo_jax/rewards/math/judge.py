"""A process that compares formulas and may be killed while it does, so that no answer costs more than its time.

`Judge` talks to a small Python that has imported `symbolic` once and forks a child to do the work. Each request starts a timer of CPU
time whose signal ends the child, also inside a computation that never comes back to Python; the next child is there in milliseconds. It
works the same from any thread (the timers that sympy's users know are signals of the main thread) and knows nothing of jax.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections import Counter
from typing import Any

CPU_SECONDS = 0.8  # of one request
WALL_SECONDS = 1.8  # of one request on a busy machine
MEMORY = 2 << 30  # bytes of address space
LATE, ERROR = "late", "error"

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cispo_jax.rewards.math.judge import main; main()"
logger = logging.getLogger(__name__)
counts: Counter[str] = Counter()  # `late`: comparisons that were stopped; `error`: comparisons that failed


class JudgeError(RuntimeError):
    """The comparison failed for a reason that is not the answer's."""


class Late(Exception):
    """The comparison would have cost too much."""


class Judge:
    """One process; `ask` may be called by one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._finalizer = weakref.finalize(self, _stop, self._process)
        if self._read() != "ready":
            self.close()
            raise JudgeError("the process that compares formulas did not start; its own message is above")

    def ask(self, kind: str, arguments: list[Any], seconds: float) -> Any:
        """The result of `kind` in `symbolic`; None if an argument cannot be read.

        Raises:
          Late: it took longer than `seconds` of CPU time, `WALL_SECONDS`, or the memory.
          JudgeError: it failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([kind, arguments, seconds]).encode() + b"\n")
            self._process.stdin.flush()
            reply = self._read()
        except BrokenPipeError:
            reply = {}
        if reply == {}:
            self.close()
            raise JudgeError("the process that compares formulas ended")
        if isinstance(reply, dict):
            if LATE in reply:
                raise Late(reply[LATE])
            raise JudgeError(reply[ERROR])
        return reply

    @property
    def alive(self) -> bool:
        return self._finalizer.alive

    def close(self) -> None:
        self._finalizer()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line)[0] if line.endswith(b"\n") else {}


class _Pool:
    """Judges of this process: as many as threads ask at the same time, but not more than cores."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.idle: queue.SimpleQueue[Judge] = queue.SimpleQueue()
        self.permits = threading.Semaphore(os.cpu_count() or 1)

    def ask(self, kind: str, arguments: list[Any], seconds: float) -> Any:
        with self.permits:
            try:
                judge = self.idle.get_nowait()
            except queue.Empty:
                judge = Judge()
            try:
                return judge.ask(kind, arguments, seconds)
            finally:
                if judge.alive:
                    self.idle.put(judge)


_pool = _Pool()


def ask(kind: str, arguments: list[Any], seconds: float = CPU_SECONDS) -> Any:
    """`Judge.ask` of a judge that is free; what goes wrong is counted, and logged if it is not the answer's fault."""
    global _pool
    if _pool.pid != os.getpid():  # after a fork: the parent's processes are the parent's
        _pool = _Pool()
    try:
        return _pool.ask(kind, arguments, seconds)
    except Late:
        counts[LATE] += 1
        raise
    except JudgeError as error:
        counts[ERROR] += 1
        if counts[ERROR] in (1, 10, 100, 1000):
            logger.warning("A comparison of formulas failed (number %d) on %s: %s", counts[ERROR], arguments, error)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        if process.stdin is not None:
            process.stdin.close()
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout=2 * WALL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """The process: it forks children that work, one after the other, and answers for one that was killed."""
    import gc
    import mmap
    import signal
    import struct

    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, and the trainer's to handle
        signal.signal(number, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    from cispo_jax.rewards.math import symbolic

    gc.freeze()
    shared = mmap.mmap(-1, 16)  # is a request being worked on, and the child's CPU seconds when it came
    reply = lambda value: os.write(replies, json.dumps([value]).encode() + b"\n")
    reply("ready")
    while True:
        shared[:] = struct.pack("dd", 0, 0)
        child = os.fork()
        if child == 0:
            _work(symbolic, shared, reply)
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        busy, before = struct.unpack("dd", shared[:])
        if status == 0:
            return
        if busy:
            spent = used.ru_utime + used.ru_stime - before
            signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            by_timer = signal_number == signal.SIGPROF or (signal_number == signal.SIGALRM and spent > CPU_SECONDS / 4)
            reply({LATE: f"{spent:.1f} s"} if by_timer else {ERROR: f"status {status} after {spent:.1f} s"})


def _work(symbolic: Any, shared: Any, reply: Any) -> None:
    """The child: requests until stdin ends. The timers' signals keep their default action, which ends the process."""
    import resource
    import signal
    import struct
    import time

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        kind, arguments, seconds = json.loads(line)
        shared[:] = struct.pack("dd", 1, time.process_time())
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        spoiled = False
        try:
            result = getattr(symbolic, kind)(*arguments)
            result = result if isinstance(result, bool) else True
        except symbolic.Unreadable:
            result = None
        except (MemoryError, RecursionError) as error:
            result, spoiled = {LATE: type(error).__name__}, True
        except Exception as error:
            result = {ERROR: f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        shared[:] = struct.pack("dd", 0, 0)
        reply(result)
        if spoiled:
            os._exit(1)
