"""The benchmarks at the smallest sizes: they run, and their figures hang together. How fast anything is, is not tested."""

import json

import pytest

from experiments.benchmarks import rl_step, sampler, shapes, timing, train_step, verifier


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(timing, "matmul_rate", lambda dtype: 1e9)
    monkeypatch.setattr(timing, "copy_rate", lambda: 1e9)
    monkeypatch.setattr(shapes, "architecture", lambda name: shapes.common(1, 64))


def test_train_step(tmp_path, capsys):
    path = tmp_path / "figures.json"
    sizes = ["--prompts=2", "--group-size=4", "--prompt=4", "--response=8"]
    train_step.main([*sizes, "--rounds=1", f"--json={path}"])
    found = json.loads(path.read_text())["figures"]
    assert found["padded_times_packed"]["wall"] == pytest.approx(
        found["padded"]["wall_seconds"] / found["packed"]["wall_seconds"]
    )
    assert all(found[name]["tokens_per_second"] > 0 for name in ("packed", "padded", "full", "bare"))
    assert "passes of" in capsys.readouterr().out


def test_sampler(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "CASES", {"equal": (2, 2, 4, 6, 0.0), "skewed": (2, 2, 4, 6, 0.2)})
    path = tmp_path / "figures.json"
    sampler.main(["--cases", "equal", "skewed", "--rounds=1", "--slots=2", f"--json={path}"])
    found = json.loads(path.read_text())["figures"]
    assert set(found["skewed"]) == {"plain", "slots 4", "slots 2"}
    assert found["equal"]["plain"]["times_plain"] == {"wall": 1.0, "cpu": 1.0}
    assert found["equal"]["bytes_per_second"] > 0 and "bytes_per_second" not in found["skewed"]


def test_a_cycle_compiles_nothing_after_the_first(tmp_path, monkeypatch, capsys):
    for name, value in dict(P=2, G=2, S=4, T=6, UPDATES=2).items():
        monkeypatch.setattr(rl_step, name, value)
    path = tmp_path / "figures.json"
    rl_step.main(["--layers=1", "--vocab=64", "--rounds=1", f"--json={path}"])
    found = json.loads(path.read_text())["figures"]
    assert found["compiled_in_the_first_cycle"] > 0 and found["compiled_after_it"] == 0
    assert found["update_times_bare"] > 0 and found["peak_rss_mib"] > 0


def test_typical_lengths():
    lengths = shapes.typical_lengths(4096, 1024)
    assert lengths.mean() == pytest.approx(1024 / 3, rel=0.01)
    assert lengths.min() >= 1 and lengths.max() == 1024


def test_the_verifier_misjudges_none(tmp_path):
    path = tmp_path / "v.json"
    verifier.main(["--pairs=40", "--endless=2", f"--json={path}"])
    figures = json.loads(path.read_text())["figures"]
    assert figures["misjudged"] == figures["mixed_misjudged"] == 0 and figures["pairs"] == 40
