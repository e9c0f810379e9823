"""A run, its weights and its data in an object store that can neither append nor rename; Orbax's own files are left out."""

import functools
import json

import debug_run
import jax
import numpy as np
import pytest
import store as double
from etils import epath

from cispo_jax import data, storage, trainer, weights
from cispo_jax.config import ConfigError, DataSettings
from cispo_jax.training.checkpoint import Checkpoints

RUN = "gs://bucket/runs/one"


@pytest.fixture
def store(monkeypatch):
    return double.install(monkeypatch)


def test_the_double_refuses_what_a_store_cannot_do(store):
    path = epath.Path("gs://bucket/x")
    path.write_text("√")
    for broken in (lambda: path.open("a"), lambda: path.rename("gs://bucket/y"), lambda: path.replace("gs://bucket/y")):
        with pytest.raises(AssertionError, match="cannot do"):
            broken()
    assert path.read_text() == "√" and not epath.Path("gs://bucket/y").exists()


@pytest.mark.parametrize("place", ["gs://bucket/logs", "{tmp}"])
def test_small_files(place, store, tmp_path):
    folder = storage.absolute(place.format(tmp=tmp_path))
    storage.write_text(folder / "a", "one")
    storage.write_text(folder / "a", "two")
    for line in ("1\n", "√\n"):
        storage.append_text(folder / "log", line)
    storage.move(folder / "a", folder / "b")
    assert sorted(path.name for path in folder.iterdir()) == ["b", "log"]
    assert (folder / "b").read_text() == "two" and (folder / "log").read_text() == "1\n√\n"
    assert str(folder / "b") == f"{place.format(tmp=tmp_path)}/b"


def test_a_run_in_a_store_leaves_what_it_leaves_on_a_disk(store, tmp_path, monkeypatch):
    """Evaluated, logged, traced, stopped after step 3 with step 2 as its newest checkpoint, and resumed: step 3 moves to discarded/."""
    debug_run.on_one_device(monkeypatch)
    small = dict(
        sampling__prompts_per_step=2, objective__num_minibatches=2, checkpoint__every=2, logging__tensorboard=True
    )
    settings = debug_run.config(num_steps=4, profile__steps="4:5", **small)

    def reward(responses, **_):
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append(1)
        return [float(len(text)) for text in responses]

    files = {}
    for place in (RUN, str(tmp_path / "disk")):
        folder = tmp_path / f"checkpoints_{'store' if storage.is_store(place) else 'disk'}"
        monkeypatch.setattr(trainer, "Checkpoints", lambda _, keep: Checkpoints(folder, keep=keep))
        calls, stop_at = [], 5  # after the trial, the evaluation and three steps
        train = functools.partial(trainer.train, settings, place, dataset=debug_run.SUMS, reward=reward)
        with pytest.raises(KeyboardInterrupt):
            train(model=debug_run.model())
        path = epath.Path(place)
        assert len((path / "metrics.jsonl").read_text().splitlines()) == 4
        calls, stop_at = [], None
        train(model=debug_run.model())
        listed = {"", "rollouts/", "evaluations/", "discarded/", "discarded/rollouts/"}
        files[place] = {f"{part}{p.name}": p for part in listed for p in (path / part).iterdir() if not p.is_dir()}
        steps = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert steps == [0, 1, 2, 3, 4] and json.loads((path / "discarded/metrics.jsonl").read_text())["step"] == 3
        assert all(event.read_bytes() for event in (path / "tensorboard").iterdir())
        assert len(list((path / "tensorboard").iterdir())) == 2 and (path / "profile/plugins").is_dir()
    there, here = files.values()
    assert there.keys() == here.keys() and "discarded/rollouts/step_000003.jsonl" in there and "config.json" in there
    for name in there.keys() - {"metrics.jsonl", "discarded/metrics.jsonl"}:
        assert there[name].read_text() == here[name].read_text(), name
    assert not any(name.endswith((".new", ".tmp")) for name in store.objects)
    with pytest.raises(ConfigError, match="--noresume"):
        train = functools.partial(trainer.train, settings, RUN, dataset=debug_run.SUMS, reward=reward)
        train(resume=False)


def test_weights_and_problems_in_a_store(store, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    model = debug_run.model()
    weights.save_pretrained("gs://bucket/model", model, debug_run.TINY, max_shard_bytes=3000)
    names = [name.rpartition("/")[2] for name in store.objects]
    assert "config.json" in names and len([name for name in names if name.endswith(".safetensors")]) > 2
    read, _ = weights.load_pretrained("gs://bucket/model", mesh=debug_run.mesh(fsdp=2))
    jax.tree.map(np.testing.assert_array_equal, read, model)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    epath.Path("gs://bucket/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet")
    epath.Path("gs://bucket/sums.parquet").write_bytes((tmp_path / "sums.parquet").read_bytes())
    for name in ("sums.jsonl", "sums.parquet"):
        assert len(data.load(DataSettings(source=f"gs://bucket/{name}", eval_size=4)).train) == 16
    with pytest.raises(ConfigError, match="directory=gs://bucket/sets"):
        data.load(DataSettings(directory="gs://bucket/sets"))
