"""Checkpoints of a run between rollout steps: the train state and the host's few integers, through Orbax."""

from __future__ import annotations

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from cispo_jax.types import TrainState


class Checkpoints:
    """The checkpoints under WORKDIR/checkpoints, newest `keep` kept; a step is listed only once it is complete."""

    def __init__(self, directory: epath.PathLike, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        directory = epath.Path(directory).resolve()
        # A kill during a save leaves these; the manager passes over them and writes the step again.
        self.unfinished = sorted(p.name for p in directory.iterdir() if "tmp" in p.name) if directory.exists() else []
        self._manager = ocp.CheckpointManager(directory, options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, host: dict[str, Any]) -> None:
        """Starts the save; call `wait` before the state's buffers are donated again."""
        if step not in self.steps():
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
            self._manager.save(step, args=items)

    def restore(self, step: int, abstract: TrainState, shardings: Any) -> tuple[TrainState, dict[str, Any]]:
        """The state of `step`, straight onto `shardings` (also of another mesh than it was saved from)."""
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["host"]

    def wait(self) -> None:
        """Blocks until the save in flight is complete; raises if it failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()
