"""Checkpoints of a run between rollout steps: the train state and the host's few integers, through Orbax."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from cispo_jax.config import ConfigError
from cispo_jax.storage import absolute
from cispo_jax.types import TrainState


class Checkpoints:
    """The checkpoints under WORKDIR/checkpoints, newest `keep` kept; a step is listed only once it is complete.

    With several processes each must make every call; they write their shards into one directory that all of them see.

    A step holds the items `model` and `optimizer`, each a flat dict from the path in the tree to its array: the files do not depend on
    the classes of the tree (Orbax cannot read a list of modules back), and the model is read alone where only it is wanted.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        directory = absolute(directory)
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
            items = {name: ocp.args.StandardSave(_flat(part)) for name, part in _parts(state).items()}
            host = copy.deepcopy(host)  # it changes while the save goes on
            self._manager.save(step, args=ocp.args.Composite(**items, host=ocp.args.JsonSave(host)))

    def restore(self, step: int, abstract: TrainState, shardings: Any) -> tuple[TrainState, dict[str, Any]]:
        """The state of `step`, straight onto `shardings` (also of another mesh than it was saved from)."""
        target = _parts(_target(abstract, shardings))
        items = {name: ocp.args.StandardRestore(_flat(part)) for name, part in target.items()}
        restored = self._restore(step, ocp.args.Composite(**items, host=ocp.args.JsonRestore()))
        parts = {name: _unflat(restored[name], part) for name, part in target.items()}
        return dataclasses.replace(parts["optimizer"], model=parts["model"]), restored["host"]

    def restore_model(self, step: int, abstract: Any, shardings: Any) -> Any:
        """The model of `step` alone; the optimizer's moments, twice its size, are not read."""
        target = _target(abstract, shardings)
        items = ocp.args.Composite(model=ocp.args.StandardRestore(_flat(target)))
        return _unflat(self._restore(step, items)["model"], target)

    def _restore(self, step: int, items: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=items)
        except Exception as error:  # Orbax and TensorStore raise many kinds
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{self._manager.directory / str(step)} cannot be restored ({type(error).__name__}: {reason}). With other settings of "
                "config.model than the run began with (its config.json), take those again or a new --workdir; if its files are "
                "damaged, delete this directory to go on from the checkpoint before it."
            ) from error

    def wait(self) -> None:
        """Blocks until the save in flight is complete; raises if it failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _parts(state: TrainState) -> dict[str, Any]:
    return {"model": state.model, "optimizer": dataclasses.replace(state, model=None)}


def _target(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def _flat(tree: Any) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _unflat(leaves: dict[str, Any], like: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _flat(like)])
