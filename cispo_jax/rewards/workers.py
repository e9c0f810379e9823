"""Processes that score, so that slow rewards use other cores than the trainer.

Each worker is a fresh Python that reads one JSON request a line and answers with one JSON line. It imports
`cispo_jax.rewards` and the user's function, never jax. `multiprocessing` is not used: its spawned children import the
parent's `__main__` again, which in a training script means jax (and, unguarded, a second training run).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cispo_jax.config import ConfigError
from cispo_jax.rewards.apply import Outcome, RewardError, Rows, apply
from cispo_jax.rewards.functions import resolve

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cispo_jax.rewards.workers import main; main()"


class Workers:
    """A fixed number of scoring processes; `run` spreads requests over them and keeps their order.

    Args:
      count: of processes.
      timeout: seconds for one request, whose process is replaced when they are over; 0 = no limit.
    """

    def __init__(self, count: int, timeout: float = 0.0):
        self._timeout = timeout
        self._processes: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        for index in range(count):
            self._processes.append(_start())
            self._idle.put(index)
        self._finalizer = weakref.finalize(self, _stop, self._processes)  # also when the interpreter exits

    def run(self, function: Callable[..., Any] | str, label: str, batches: Sequence[Rows]) -> list[Outcome]:
        """Applies one reward function to each batch, each in some worker."""
        return [future.result() for future in [self.submit(function, label, rows) for rows in batches]]

    def submit(self, function: Callable[..., Any] | str, label: str, rows: Rows) -> Future[Outcome]:
        """The same for one batch, without waiting."""
        name, arguments = name_of(function)
        request = {"function": name, "arguments": arguments, "label": label, "rows": vars(rows)}
        return self._threads.submit(self._ask, label, json.dumps(request, default=str), rows)

    def close(self) -> None:
        self._threads.shutdown()
        self._finalizer()

    def _ask(self, label: str, request: str, rows: Rows) -> Outcome:
        index = self._idle.get()
        try:
            process = self._processes[index]
            try:
                answer = _exchange(process, request, self._timeout)
                problem = "" if answer else "its worker process ended with code {code}"
            except TimeoutError:
                problem = f"no answer after config.rewards.timeout={self._timeout:g} seconds"
                process.kill()
            if problem:  # killed for memory, perhaps: these rows have no reward, the next get a new process
                _stop([process])
                self._processes[index] = _start()
                text = f"{label}: {problem.format(code=process.returncode)} on example {rows.examples[0].get('id')!r}."
                return Outcome([None] * len(rows), len(rows), [text])
        finally:
            self._idle.put(index)
        reply = json.loads(answer)
        if "reward_error" in reply:
            raise RewardError(reply["reward_error"])
        return Outcome(**reply)


def name_of(function: Callable[..., Any] | str) -> tuple[str, dict[str, Any] | None]:
    """How another process finds a function: its spec, or module:name and, for a dataclass (a scorer), its fields."""
    if isinstance(function, str):
        return function, None
    if dataclasses.is_dataclass(function) and not isinstance(function, type):
        kind = type(function)
        return f"{kind.__module__}:{kind.__qualname__}", dataclasses.asdict(function)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<unnamed>")
    if module in (None, "__main__") or "<" in name:
        raise ConfigError(
            f"config.rewards.workers > 0 needs functions that another process can import; {name} of {module} is not "
            "one: put it in a file and name it as path/file.py:function, or use config.rewards.workers=0."
        )
    return f"{module}:{name}", None


def main() -> None:
    """The worker: requests from stdin, answers to stdout, until stdin ends (the trainer closed it or died)."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, and the trainer's to handle
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a reward function prints goes to stderr, not between the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            function = _function(request["function"], json.dumps(request["arguments"]))
            reply = apply(function, request["label"], Rows(**request["rows"]))._asdict()
        except ConfigError as error:
            reply = {"reward_error": str(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


@functools.cache
def _function(name: str, arguments: str) -> Callable[..., Any]:
    if arguments == "null":
        return resolve(name)
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)(**json.loads(arguments))


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )


def _exchange(process: subprocess.Popen[str], request: str, timeout: float) -> str:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    # Nothing of the answer is in Python's buffer yet: one request, one line.
    if timeout and not select.select([process.stdout], [], [], timeout)[0]:
        raise TimeoutError
    return process.stdout.readline()


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
