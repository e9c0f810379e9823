"""experiments/minimal.py, the method in one file, is the trainer on configs/debug.py: same settings, same losses."""

import json
from pathlib import Path

import debug_run
import numpy as np

from cispo_jax import trainer
from cispo_jax.config import from_config_dict
from configs import debug
from experiments import minimal


def test_minimal_gives_the_trainers_losses(tmp_path, monkeypatch):
    debug_run.on_one_device(monkeypatch)
    page = debug.get_config()
    page.num_steps = 3
    page.evaluation.every = page.evaluation.samples = 0
    page.evaluation.num_problems = 4
    page.logging.tensorboard = False
    trainer.train(from_config_dict(page), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = minimal.main(3)
    assert any(line["updates"] > 1 for line in lines[1:])  # there was something to compare
    np.testing.assert_allclose(losses, [line["loss"] or 0.0 for line in lines[1:]], rtol=1e-5, atol=1e-7)


def test_minimal_is_one_short_file_without_a_config():
    text = Path(minimal.__file__).read_text()
    assert len(text.splitlines()) <= 200 and "configs" not in [
        line.split()[1] for line in text.splitlines() if line.startswith("from ")
    ]
