"""The small files of a run, on a disk or in an object store (gs://, s3://), which can neither append nor rename.

On a disk a file is replaced in one go, and a log grows by appending. In a store a file is an object that is put whole: a log is put again
with each line, a move is a copy. What Orbax writes (WORKDIR/checkpoints) does not come through here: it knows gs:// and s3:// itself, and
marks a checkpoint there as complete by a file of its own instead of a rename.
"""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import os
import tempfile

from etils import epath


def is_store(path: epath.PathLike) -> bool:
    return "://" in os.fspath(path)


def absolute(path: epath.PathLike) -> epath.Path:
    return epath.Path(path) if is_store(path) else epath.Path(path).resolve()


def write_text(path: epath.Path, text: str) -> None:
    """The file, whole or not at all."""
    if is_store(path):
        path.write_text(text)
    else:
        unfinished = path.with_name(f"{path.name}.new")
        unfinished.write_text(text)
        unfinished.replace(path)


def append_text(path: epath.Path, text: str) -> None:
    if is_store(path):
        path.write_text((path.read_text() if path.exists() else "") + text)
    else:
        with path.open("a") as file:
            file.write(text)


def move(source: epath.Path, target: epath.Path) -> None:
    """Replaces `target`."""
    if is_store(source):
        target.write_bytes(source.read_bytes())
        source.unlink()
    else:
        source.replace(target)


class LocalFolder:
    """A folder for libraries that write to disks only: `folder` itself, or one beside it whose files `put` takes to the store."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._temporary = tempfile.TemporaryDirectory() if is_store(folder) else None
        self.path = epath.Path(self._temporary.name if self._temporary else folder)

    def put(self) -> None:
        """Every file as it is now."""
        if self._temporary:
            for directory, _, names in os.walk(self.path):
                for name in names:
                    file = epath.Path(directory) / name
                    target = self._folder / str(file.relative_to(self.path))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.read_bytes())
