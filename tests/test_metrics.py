"""metrics.jsonl, rollouts/ and discarded/: what a resumed run finds and what it moves away."""

import json

import pytest
from etils import epath

from cispo_jax.config import LoggingSettings
from cispo_jax.evaluation import write_records
from cispo_jax.training.metrics import Writer, discard_after

PLAIN = LoggingSettings(tensorboard=False)


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def written(tmp_path, last=4):
    workdir = epath.Path(tmp_path)
    writer = Writer(workdir, PLAIN, {})
    for step in range(last + 1):
        if step:
            writer.rollouts(step, [{"response": f"{step}"}])
            write_records(workdir / f"evaluations/step_{step:06d}.jsonl", [{"verdict": f"{step}"}])
        writer.metrics(step, {"loss": float(step)})
    writer.close()
    return workdir


def test_one_strict_json_object_a_step(tmp_path):
    writer = Writer(epath.Path(tmp_path), PLAIN, {})
    writer.metrics(0, {"eval/accuracy": 0.25})
    writer.metrics(1, {"loss": float("nan"), "grad/norm": float("inf"), "updates": 16})
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert lines == [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "loss": None, "grad/norm": None, "updates": 16}]


def test_rollouts_keep_every_character_and_may_be_cut(tmp_path):
    rows = [{"response": "√2 \n ✓"}, {"response": "\u2028 b"}, {"response": "c"}]
    Writer(epath.Path(tmp_path), PLAIN, {}).rollouts(7, rows)
    text = (tmp_path / "rollouts/step_000007.jsonl").read_text()
    assert [json.loads(line) for line in text.rstrip("\n").split("\n")] == rows and "√2" in text
    Writer(epath.Path(tmp_path), LoggingSettings(tensorboard=False, samples=2), {}).rollouts(7, rows)
    assert (tmp_path / "rollouts/step_000007.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("step", "kept", "late"),
    [(2, [0, 1, 2], [3, 4]), (4, [0, 1, 2, 3, 4], []), (0, [0], [1, 2, 3, 4]), (-1, [], [0, 1, 2, 3, 4])],
)
def test_what_lies_after_the_restored_step_is_moved(tmp_path, step, kept, late):
    workdir = written(tmp_path)
    assert discard_after(workdir, step) == len(late)
    assert steps(tmp_path / "metrics.jsonl") == kept and steps(tmp_path / "discarded/metrics.jsonl") == late
    names = lambda folder: sorted(int(p.stem[5:]) for p in (tmp_path / folder).glob("step_*.jsonl"))
    for folder in ("rollouts", "evaluations"):
        assert names(folder) == [s for s in kept if s] and names(f"discarded/{folder}") == [s for s in late if s]
    assert not late or (tmp_path / "discarded/rollouts/step_000004.jsonl").read_text() == '{"response": "4"}\n'
    assert discard_after(workdir, step) == 0  # again: nothing to do


def test_a_line_cut_short_is_moved_and_a_second_discard_is_kept_beside_the_first(tmp_path):
    workdir = written(tmp_path, 2)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text[:-9])
    assert discard_after(workdir, 2) == 1
    assert steps(tmp_path / "metrics.jsonl") == [0, 1]
    writer = Writer(workdir, PLAIN, {})
    writer.metrics(2, {"loss": 2.0})
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2]  # no line is glued to a torn one
    assert discard_after(workdir, 1) == 1
    assert (tmp_path / "discarded/metrics.jsonl").read_text().count('"step": 2') == 2


def test_a_kill_while_lines_are_moved_loses_none(tmp_path, monkeypatch):
    """The file of the kept lines is replaced in one go: dying while it is written leaves the old one."""
    workdir = written(tmp_path)
    real = type(workdir).write_text

    def dies(self, text, *args, **kwargs):
        real(self, text[: len(text) // 2], *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(workdir), "write_text", dies)
    with pytest.raises(KeyboardInterrupt):
        discard_after(workdir, 2)
    monkeypatch.undo()
    discard_after(workdir, 2)
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2]


def test_an_empty_directory_has_nothing_to_discard(tmp_path):
    assert discard_after(epath.Path(tmp_path), -1) == 0
    assert not list(tmp_path.iterdir())


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboardX.proto import event_pb2

    writer = Writer(epath.Path(tmp_path), LoggingSettings(), {})
    writer.metrics(3, {"loss": 0.5})
    writer.close()
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    data, found, at = events.read_bytes(), [], 0
    while at < len(data):  # records: length, its checksum, the event, its checksum
        size = int.from_bytes(data[at : at + 8], "little")
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        at += size + 16
    assert found == [(3, "loss", 0.5)]
