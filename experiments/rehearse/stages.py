"""The stages of a rehearsal: the commands of the run as child processes, what must be true after each, and the table of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cispo_jax.config import Config, MeshSettings
from experiments.rehearse import shrink

LIMIT = 900  # seconds of a stage; one that takes longer hangs
TAIL = 15  # lines of a log that are shown
# A process of its own, whatever cluster this machine belongs to.
ALONE = ["--coordinator=localhost:1", "--num_processes=1", "--process_id=0"]


class Failed(Exception):
    """A stage did not do what it must; `code` is the exit code of the rehearsal: 2 for an error of the user, else 1."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass
class Life:
    """Runs the commands; their output goes to FOLDER/logs, the run itself to FOLDER/run.

    Attributes:
      settings: --config=PAGE and the settings of the user. config: what is rehearsed. overrides: the flags that make it of `settings`.
    """

    folder: Path
    settings: list[str]
    overrides: list[str]
    config: Config

    def __post_init__(self):
        self.run = self.folder / "run"
        (self.folder / "logs").mkdir(exist_ok=True)

    # ---- one stage after the other

    def train(self) -> str:
        """Until a step is done, then SIGTERM."""
        log, process = self._start("train", "train", self.config.mesh)
        try:
            deadline = time.monotonic() + LIMIT
            while process.poll() is None and not (self._steps() and self._steps()[-1] > 0):
                if time.monotonic() > deadline:
                    raise Failed(f"no rollout step was done in {LIMIT} s", 1)
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        except BaseException:
            process.kill()
            raise
        self._wait(log, process, expected=75)
        saved = sorted(int(path.name) for path in (self.run / "checkpoints").iterdir() if path.name.isdigit())
        if saved[-1:] != self._steps()[-1:]:
            raise Failed(
                f"after SIGTERM the checkpoints are of the steps {saved}, metrics.jsonl ends with {self._steps()[-1:]}"
            )
        return f"SIGTERM after step {saved[-1]} of {self.config.num_steps}: saved, exit code 75"

    def resume(self) -> str:
        """The same command on another mesh, to the end."""
        mesh = shrink.other_mesh(self.config.mesh)
        self._command("resume", "train", mesh)
        lines = self._lines()
        steps = [line["step"] for line in lines]
        if steps != list(range(self.config.num_steps + 1)):
            raise Failed(f"metrics.jsonl holds the steps {steps}, not each of 0 to {self.config.num_steps} once")
        trained = [line for line in lines if line.get("updates")]
        names = ("loss", "grad/norm", "policy/entropy", "policy/rollout_mismatch_max")
        bad = [f"{name} of step {line['step']}" for line in trained for name in names if line[name] is None]
        bad += [f"eval/accuracy of step {n}" for n in (0, steps[-1]) if lines[n].get("eval/accuracy") is None]
        if bad or not trained:
            raise Failed(f"not a finite number: {', '.join(bad) or 'loss (no step had an update)'}")
        updates = sum(int(line["updates"]) for line in trained)
        return f"on mesh {_sizes(mesh)}; {updates} updates, every number finite"

    def evaluate(self) -> str:
        """The last checkpoint, on the first mesh."""
        out = self._command("evaluate", "evaluate", self.config.mesh)
        metrics = json.loads(out.splitlines()[-1])
        if metrics["step"] != self.config.num_steps or metrics["eval/accuracy"] is None:
            raise Failed(f"no accuracy of step {self.config.num_steps}: {metrics}")
        return ", ".join(f"{name} {value:.1%}" for name, value in metrics.items() if _is_accuracy(name))

    def export(self) -> str:
        """The last checkpoint as a folder, on the second mesh."""
        self._command("export", "export", shrink.other_mesh(self.config.mesh))
        return str(self.exported)

    @property
    def exported(self) -> Path:
        return self.run / "export" / f"step_{self.config.num_steps:06d}"

    def report(self) -> str:
        if importlib.util.find_spec("experiments.report") is None:
            return "there is no experiments.report yet"
        self._command("report", "report", self.config.mesh)
        return ""

    # ---- children

    def _command(self, stage: str, command: str, mesh: MeshSettings) -> str:
        log, process = self._start(stage, command, mesh)
        self._wait(log, process)
        return log.read_text()

    def _start(self, stage: str, command: str, mesh: MeshSettings) -> tuple[Path, subprocess.Popen]:
        flags = [f"--config.mesh.{axis}={getattr(mesh, axis)}" for axis in ("data", "fsdp", "expert", "tensor")]
        module = ["-m", f"experiments.{command}", *self.settings, *self.overrides, *flags, f"--workdir={self.run}"]
        log = self.folder / "logs" / f"{stage}.log"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(shrink.DEVICES),
            "HF_HUB_OFFLINE": "1",
            # Programs are compiled once and hardly run: this halves the time.
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0",
        }
        (self.folder / "logs" / f"{stage}.command").write_text(" ".join(["python", *map(repr, module)]) + "\n")
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *module, *ALONE], stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        return log, process

    def _wait(self, log: Path, process: subprocess.Popen, *, expected: int = 0) -> None:
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {LIMIT} s{_tail(log)}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code == expected:
            return
        text = log.read_text()
        errors = [match.start() for match in re.finditer("^error: ", text, re.MULTILINE)]
        if code == 2 and errors:
            raise Failed(text[errors[-1] :].rstrip(), 2)
        raise Failed(f"exit code {code}, expected {expected}{_tail(log)}", 2 if code == 2 else 1)

    def _lines(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _steps(self) -> list[int]:
        return [line["step"] for line in self._lines()]


def _tail(log: Path) -> str:
    return "; its last lines:\n" + "\n".join(log.read_text().splitlines()[-TAIL:])


def _sizes(mesh: MeshSettings) -> str:
    return " x ".join(
        f"{axis} {getattr(mesh, axis)}" for axis in ("data", "fsdp", "expert", "tensor") if getattr(mesh, axis) > 1
    )


def _is_accuracy(name: str) -> bool:
    return name == "eval/accuracy" or (name.startswith("eval/avg@") and "_" not in name)


class Table:
    """One line a stage, printed when it ends."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """The body appends what is to be said of the stage."""
        start, said = time.monotonic(), list[str]()
        result = "FAILED"
        try:
            yield said
            result = "ok"
        finally:
            seconds = time.monotonic() - start
            print(f"  {name:<10}{result:<8}{seconds:>6.1f} s   {'; '.join(said)}".rstrip(), flush=True)
