"""Every shipped config page: it loads, says how to run it, holds valid settings, and survives config.json."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

from cispo_jax.config import ConfigError, from_config_dict, to_dict

PAGES = sorted(p.stem for p in (Path(__file__).parent.parent / "configs").glob("*.py") if p.stem != "__init__")


def page(name: str):
    return importlib.import_module(f"configs.{name}").get_config()


def test_the_pages_that_the_readme_names_are_there():
    assert {"quickstart", "smollm2_reasoning", "from_scratch", "debug"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_the_settings_are_valid_and_survive_config_json(name):
    config = from_config_dict(page(name))
    assert from_config_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("name", PAGES)
def test_unknown_and_mistyped_settings_are_refused(name):
    unknown = page(name)
    with pytest.raises(AttributeError, match="learning_rat"):
        unknown.lock().optimizer.learning_rat = 1e-5
    mistyped = page(name)
    with pytest.raises(TypeError, match="num_steps"):
        mistyped.num_steps = "many"
    misplaced = page(name)
    misplaced.learning_rate = 1e-5
    with pytest.raises(ConfigError, match=r"config\.optimizer\.learning_rate"):
        from_config_dict(misplaced)


@pytest.mark.parametrize("name", PAGES)
def test_two_calls_share_nothing(name):
    first, second = page(name), page(name)
    first.optimizer.learning_rate = 1.0
    assert second == page(name) != first


@pytest.mark.parametrize("name", PAGES)
def test_the_docstring_holds_the_command(name):
    path = Path(__file__).parent.parent / "configs" / f"{name}.py"
    text = path.read_text()
    doc = ast.get_docstring(ast.parse(text))
    assert re.search(
        rf"^ *python -m experiments\.train --config=configs/{name}\.py --workdir=runs/\w+( --config\.\S+)*$",
        doc,
        re.MULTILINE,
    )
    assert len(text.splitlines()) <= 60
