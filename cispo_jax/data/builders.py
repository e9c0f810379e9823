"""Generated problems as TFDS data sets: written once to array_record, read back with random access. No TensorFlow.

One builder a family; its config is named after everything that decides the content (options, sizes, seed, version of
the generator), so that two different sets never share a directory. TFDS writes into a temporary directory and renames
it at the end: a set whose generation was interrupted is never read.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from etils import epath

from cispo_jax.config import ConfigError, DataSettings
from cispo_jax.data import files, math_sets, tasks
from cispo_jax.rewards.scoring import reasoning_gym_version


@dataclasses.dataclass(eq=False)
class ProblemsConfig(tfds.core.BuilderConfig):
    """`recipe` is what decides the content of a set; `make_config` derives the name from it."""

    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def make_config(label: str, **recipe: Any) -> ProblemsConfig:
    """A config whose name says what it is to a person (`label`) and to the file system (a hash of the recipe)."""
    text = json.dumps(recipe, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return ProblemsConfig(name=f"{label}-{digest}", description=text, recipe=recipe)


class CispoProblems(tfds.core.GeneratorBasedBuilder):
    """What the families share: two splits, and the counts of what was dropped in the metadata."""

    VERSION = tfds.core.Version("1.0.0")  # raise it whenever the same recipe yields other problems
    url_infos = None  # nothing is downloaded; looking for checksums needs a package that TFDS does not declare

    @abc.abstractmethod
    def features(self) -> dict[str, Any]:
        """The fields of a problem."""

    @abc.abstractmethod
    def problems(self) -> tasks.Generated:
        """Generates the set from `self.builder_config.recipe`."""

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            description=str(self.__doc__),
            features=tfds.features.FeaturesDict({"id": text, "prompt": text, "answer": text, **self.features()}),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,  # the problems come in random order
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # nothing to download
        generated = self.problems()
        self.info.metadata.update(generated.counts)
        splits = {"train": generated.train, "evaluation": generated.evaluation}
        return {name: self._generate_examples(problems) for name, problems in splits.items()}

    def _generate_examples(self, problems: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from enumerate(problems)


class CispoArithmetic(CispoProblems):
    """Sums and differences of small numbers, with a worked demonstration (`tasks.arithmetic`)."""

    def features(self) -> dict[str, Any]:
        return {"response": tfds.features.Text(), "operands": tfds.features.Tensor(shape=(None,), dtype=np.int64)}

    def problems(self) -> tasks.Generated:
        recipe = dict(self.builder_config.recipe)
        return tasks.arithmetic(tasks.ArithmeticOptions(**recipe.pop("options")), **recipe)


class CispoReasoningGym(CispoProblems):
    """Problems of one reasoning-gym task; `metadata` is JSON text for the task's scorer (`tasks.reasoning_gym`)."""

    def features(self) -> dict[str, Any]:
        return {"metadata": tfds.features.Text()}

    def problems(self) -> tasks.Generated:
        recipe = dict(self.builder_config.recipe)
        del recipe["version"]
        return tasks.reasoning_gym(recipe.pop("task"), recipe.pop("options"), **recipe)


class CispoMath(tfds.core.GeneratorBasedBuilder):
    """Problems of a public file (`math_sets`), one split; `metadata` is JSON text of the fields that only some sets have."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None

    def _info(self) -> tfds.core.DatasetInfo:
        name = self.builder_config.recipe["set"]
        found = math_sets.SETS[name]
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"{name}: {self.__doc__}",
            features=tfds.features.FeaturesDict(dict.fromkeys(math_sets.FEATURES, tfds.features.Text())),
            homepage=found.homepage,
            citation=found.citation,
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,  # in the order of the file
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # the user has the file
        found = self.builder_config.read()
        self.info.metadata.update({"duplicates": found.duplicates, "sha256": self.builder_config.recipe["sha256"]})
        return {self.builder_config.recipe["split"]: self._generate_examples(found.examples)}

    def _generate_examples(self, examples: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from enumerate(map(math_sets.as_text, examples))


@dataclasses.dataclass(eq=False)
class MathConfig(ProblemsConfig):
    """`read` gives the problems of the file, once they have to be written."""

    read: Callable[[], files.FileProblems] = lambda: files.FileProblems([], 0)


def math_set(
    name: str, path: str, settings: DataSettings, setting: str, *, split: str
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The problems of a public file and its metadata (`duplicates`, `sha256`), written unless the same file was before."""
    digest = hashlib.sha256()
    with files.locate(path, setting).open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    base = make_config(name, set=name, split=split, sha256=digest.hexdigest(), format=1)
    read = lambda: files.read(path, settings, setting, math_sets.SETS[name].read)
    config = MathConfig(name=base.name, description=base.description, recipe=base.recipe, read=read)
    builder = _prepare(CispoMath, config, settings.directory)
    return builder.as_data_source(split), dict(builder.info.metadata) | {"path": str(builder.data_path)}


def arithmetic(options: tasks.ArithmeticOptions, directory: str, **sizes: int) -> tfds.core.DatasetBuilder:
    """The set of sums and differences, generated unless it is there. `sizes`: train_size, eval_size, seed."""
    return _prepare(CispoArithmetic, make_config("arithmetic", options=dataclasses.asdict(options), **sizes), directory)


def reasoning_gym(task: str, options: Mapping[str, Any], directory: str, **sizes: int) -> tfds.core.DatasetBuilder:
    """The set of a reasoning-gym task, generated unless it is there. `sizes`: train_size, eval_size, seed."""
    tasks.reasoning_gym_dataset(task, options, seed=0, size=1)  # a typo is refused before anything is written
    config = make_config(task, task=task, options=dict(options), version=reasoning_gym_version(), **sizes)
    return _prepare(CispoReasoningGym, config, directory)


def _prepare(
    kind: type[tfds.core.GeneratorBasedBuilder], config: ProblemsConfig, directory: str
) -> tfds.core.DatasetBuilder:
    if "://" in directory:
        raise ConfigError(
            f"config.data.directory={directory}: generated sets are kept on a disk of each host; give a directory, or leave it empty."
        )
    with _quiet():
        builder = kind(config=config, data_dir=directory or None, file_format="array_record")
        path = epath.Path(builder.data_path)
        if path.exists() and not (path / "dataset_info.json").exists():
            raise ConfigError(
                f"config.data.directory: {path} is no finished data set (was it copied in part?). Delete it."
            )
        try:
            builder.download_and_prepare()
        except OSError as error:
            if not (path / "dataset_info.json").exists():
                raise ConfigError(
                    f"config.data.directory: the data set cannot be written to {path}: {error}."
                ) from error
            # Another process finished the same set meanwhile: read that one.
            builder = kind(config=config, data_dir=directory or None, file_format="array_record")
        return builder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without TFDS's progress bars, its announcements and its warning about a config that is not in a list."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
