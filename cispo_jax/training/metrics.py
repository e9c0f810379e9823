"""Where a run's numbers and samples go: metrics.jsonl, TensorBoard, W&B, rollouts/step_000123.jsonl.

The line of a step is written before its checkpoint, so after any kill the lines are ahead of the checkpoint and never behind;
on resume what lies after the restored step is moved to discarded/.
"""

from __future__ import annotations

import json
import math
from typing import Any

from etils import epath

from cispo_jax.config import LoggingSettings
from cispo_jax.distributed import is_main, main_only
from cispo_jax.storage import LocalFolder, append_text, move, write_text


class Writer:
    """Writes one object a step, on the main process; `close` flushes the event files."""

    def __init__(self, workdir: epath.Path, settings: LoggingSettings, config: dict[str, Any]):
        self._workdir = workdir
        self._samples = settings.samples
        self._tensorboard = self._wandb = None
        if not is_main():
            return
        (workdir / "rollouts").mkdir(parents=True, exist_ok=True)
        if settings.tensorboard:
            from tensorboardX import SummaryWriter

            self._events = LocalFolder(workdir / "tensorboard")
            self._tensorboard = SummaryWriter(str(self._events.path))
        if settings.wandb:
            import wandb

            self._files = LocalFolder(workdir)
            self._wandb = wandb.init(project=settings.wandb, dir=str(self._files.path), config=config, resume="allow")

    @main_only
    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Appends {"step": step, ...}; a value that is not finite becomes null, since JSON has no NaN."""
        line = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        append_text(self._workdir / "metrics.jsonl", json.dumps(line) + "\n")
        if self._tensorboard:
            for name, value in values.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
            self._events.put()
        if self._wandb:
            self._wandb.log(values, step=step)

    @main_only
    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """One line a sampled response: prompt, response, reward and its parts, finish reason."""
        rows = rows[: self._samples] if self._samples else rows
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(self._workdir / "rollouts" / f"step_{step:06d}.jsonl", text)

    def close(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
            self._events.put()
        if self._wandb:
            self._wandb.finish()


def discard_after(workdir: epath.Path, step: int) -> int:
    """Moves metric lines, rollouts and evaluations after `step` (-1: all of them) to discarded/; returns how many steps that were."""
    if not is_main():
        return 0
    path = workdir / "metrics.jsonl"
    discarded = workdir / "discarded"
    kept: list[str] = []
    late: list[str] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        try:
            (kept if json.loads(line)["step"] <= step else late).append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            late.append(line)  # the line that a kill cut short
    folders = [workdir / "rollouts", workdir / "evaluations"]
    stale = [
        p for folder in folders for p in sorted(folder.glob("step_*.jsonl")) if int(p.name[5:].split(".")[0]) > step
    ]
    if late or stale:
        discarded.mkdir(parents=True, exist_ok=True)
        append_text(discarded / "metrics.jsonl", "".join(late))
        write_text(path, "".join(kept))  # replaced whole, after that: a kill in between loses no line
    for file in stale:
        (discarded / file.parent.name).mkdir(exist_ok=True)
        move(file, discarded / file.parent.name / file.name)
    return len(late)
