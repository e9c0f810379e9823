"""Settings: everything wrong is refused by name before any work, and every page survives lock, freeze, save and reload (O-33 to O-35)."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from ml_collections import config_dict

from cispo_jax.config import (
    Config,
    ConfigError,
    ProfileSettings,
    SamplingMeshSettings,
    checks,
    default_config,
    from_config_dict,
    profile_steps,
    set_from_text,
    to_dict,
)

PAGES = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
PAGES = [page for page in PAGES if page.stem != "__init__"]


def load(page: Path):
    spec = importlib.util.spec_from_file_location(page.stem, page)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def changed(**changes):
    page = default_config()
    for name, value in changes.items():
        *sections, key = name.split("__")
        table = page
        for section in sections:
            table = table[section]
        table[key] = value
    return page


def refused(page) -> str:
    with pytest.raises(ConfigError) as error:
        from_config_dict(page)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_defaults_are_valid_and_the_same_from_both_sides():
    assert from_config_dict(default_config()) == Config()
    assert from_config_dict(Config()) == Config()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_locks_freezes_saves_and_reloads_equal(page):
    loaded = load(page)
    loaded.lock()
    frozen = config_dict.FrozenConfigDict(loaded)
    expected = from_config_dict(loaded)
    assert from_config_dict(frozen) == expected
    # config.json, as a run writes it, gives the same settings again.
    assert from_config_dict(json.loads(json.dumps(to_dict(expected)))) == expected


def test_empty_sequences_of_a_page_survive():
    """ml_collections cannot freeze an empty tuple before an empty list (O-33); here they are lists, as in config.json."""
    page = changed(data__options={"words": (), "more": [], "deep": {"a": ()}}, data__template_kwargs={"x": None})
    page.lock()
    expected = from_config_dict(page)
    assert expected.data.options == {"words": [], "more": [], "deep": {"a": []}}
    assert from_config_dict(config_dict.ConfigDict(to_dict(expected))) == expected


def test_own_rewards_reload_from_config_json():
    expected = from_config_dict(changed(rewards__short="my_reward.py:short", rewards__workers=2))
    assert expected.rewards.functions == {"short": "my_reward.py:short"}
    assert from_config_dict(json.loads(json.dumps(to_dict(expected)))) == expected


def test_a_section_inside_a_section():
    page = default_config().to_dict()
    set_from_text(page, "mesh.sampling.tensor", "4")
    assert from_config_dict(page).mesh.sampling == SamplingMeshSettings(tensor=4)
    with pytest.raises(
        ConfigError, match=r"config.mesh.sampling.fsdp: unknown setting in section config.mesh.sampling"
    ):
        set_from_text(page, "mesh.sampling.fsdp", "4")
    with pytest.raises(ConfigError, match=r"config.mesh.sampling=2: this is a section of settings"):
        from_config_dict({**page, "mesh": {"sampling": 2}})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_a_page(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 60 and f"--config=configs/{page.name}" in text
    assert ".get(" not in text


def test_every_setting_has_a_default_of_its_type():
    def check(section):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value):
                check(value)
            else:
                assert isinstance(value, int | float | str | bool | dict | None), field.name

    check(Config())
    for name in (*checks.CHOICES, *checks.MINIMUM, *checks.POSITIVE, *checks.WHY):
        checks._get(Config(), name)  # the tables name settings that exist


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (dict(learning_rate=1e-6), ["config.learning_rate", "config.optimizer.learning_rate", "num_steps"]),
        (dict(optimizer__num_epochs=2), ["config.optimizer.num_epochs", "config.objective.num_epochs", "warmup"]),
        (dict(objective__epsilon_hihg=3.0), ["config.objective.epsilon_hihg", '"epsilon_high"', "num_minibatches"]),
        (dict(sampling__group_sise=3), ["config.sampling.group_sise", '"group_size"']),
        (dict(samplng={"group_size": 3}), ["config.samplng", '"sampling"']),
        (dict(rewards__wokers=3), ["config.rewards.wokers", '"workers"', "module_or_file:function"]),
        (dict(rewards__mine="no_colon"), ["config.rewards.mine", "module_or_file:function"]),
        (dict(sampling=3), ["config.sampling=3", "section"]),
        (dict(data__options=3), ["config.data.options=3", "table"]),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_unknown_and_misplaced_keys(page, words):
    text = refused(changed_unsafely(page))
    assert all(word in text for word in words), text


def changed_unsafely(changes):
    plain = default_config().to_dict()
    for name, value in changes.items():
        *sections, key = name.split("__")
        table = plain
        for section in sections:
            table = table[section]
        table[key] = value
    return plain


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_steps", "3", ["int", "str"]),
        ("num_steps", 3.0, ["int", "float"]),
        ("num_steps", True, ["int", "bool"]),
        ("num_steps", None, ["int"]),
        ("model.remat", 1, ["str", "int"]),
        ("sampling.temperature", "hot", ["float", "str"]),
        ("objective.epsilon_high", "4", ["float", "str"]),
        ("model.dtype", 32, ["str"]),
        ("sampling.group_size", 1, ["at least 2"]),
        ("sampling.group_size", 0, ["at least 2"]),
        ("sampling.group_size", -8, ["at least 2"]),
        ("sampling.max_new_tokens", 0, ["at least 1"]),
        ("sampling.temperature", 0.0, ["above 0", "greedy"]),
        ("sampling.temperature", -1.0, ["above 0"]),
        ("sampling.temperature", float("nan"), ["above 0"]),
        ("sampling.temperature", float("inf"), ["finite"]),
        ("sampling.top_p", 0.9, ["top_p=1", "config.evaluation.top_p"]),
        ("sampling.top_k", 5, ["top_k=0"]),
        ("objective.num_minibatches", 0, ["at least 1"]),
        ("objective.num_minibatches", 5, ["config.sampling.prompts_per_step=16", "1, 2, 4, 8, 16"]),
        ("sampling.prompts_per_step", 7, ["config.objective.num_minibatches=16", "1, 7"]),
        ("sampling.prompts_per_step", 0, ["at least 1"]),
        ("objective.micro_batch_tokens", -1, ["at least 0"]),
        ("model.remat", "True", ["full, attention, off"]),
        ("objective.epsilon_high", 0.0, ["above 0", "1 + epsilon_high"]),
        ("objective.epsilon_high", -0.2, ["above 0"]),
        ("objective.epsilon_high", float("nan"), ["above 0"]),
        ("objective.epsilon_low", -0.1, ["0 or more"]),
        ("objective.epsilon_low", float("nan"), ["epsilon_low"]),
        ("objective.mask_epsilon_high", 0.2, ["unified"]),
        ("objective.truncated_importance_cap", 0.0, ["above 0"]),
        ("objective.aggregation", "tokens", ["token, prompt, sequence, constant", '"token"']),
        ("objective.anchor", "sampler", ["old, rollout"]),
        ("objective.advantage", "grpo", ["group, rloo"]),
        ("objective.advantage_scale", "None", ["group, batch, none"]),
        ("model.dtype", "bf16", ["float32, bfloat16"]),
        ("optimizer.learning_rate", 0.0, ["above 0"]),
        ("optimizer.eps", 0.0, ["above 0"]),
        ("optimizer.b2", 1.0, ["0 <= b2 < 1"]),
        ("optimizer.warmup", -1, ["at least 0"]),
        ("optimizer.warmup_unit", "steps", ["rollout_steps, updates"]),
        ("optimizer.schedule", "cosin", ["constant, linear, cosine", '"cosine"']),
        ("optimizer.max_grad_norm", -1.0, ["at least 0"]),
        ("evaluation.top_p", 0.0, ["0 < top_p <= 1"]),
        ("evaluation.batch_rows", 0, ["at least 1"]),
        ("rewards.overlong_buffer", 65, ["config.sampling.max_new_tokens=64"]),
        ("rewards.workers", -1, ["at least 0"]),
        ("data.eval_size", 0, ["at least 1"]),
        ("data.long_prompts", "cut", ["refuse, filter"]),
        ("profile.steps", "3", ["FIRST:LAST"]),
        ("profile.steps", "5:3", ["FIRST:LAST"]),
        ("profile.steps", "0:2", ["FIRST:LAST"]),
        ("checkpoint.every", 0, ["at least 1"]),
        ("seed", -1, ["at least 0"]),
    ],
)
def test_wrong_values_name_the_setting_the_value_and_what_is_valid(name, value, words):
    text = refused(changed_unsafely({name.replace(".", "__"): value}))
    assert f"config.{name}={value!r}" in text or f"config.{name}={value}" in text, text
    assert all(word in text for word in words), text


def test_settings_that_contradict_each_other():
    text = refused(changed_unsafely({"objective__anchor": "rollout", "objective__truncated_importance_cap": 2.0}))
    assert "count it twice" in text
    text = refused(changed_unsafely({"evaluation__samples": 4, "evaluation__temperature": 0.0}))
    assert "config.evaluation.temperature=0" in text
    from_config_dict(changed_unsafely({"evaluation__samples": 0, "evaluation__temperature": 0.0}))
    unified = {"objective__name": "unified", "objective__mask_epsilon_high": 0.2, "objective__mask_epsilon_low": 0.2}
    from_config_dict(changed_unsafely(unified))


def test_whole_numbers_become_floats_and_optional_settings_may_be_none():
    built = from_config_dict(
        changed_unsafely({"sampling__temperature": 1, "objective__epsilon_high": 4, "optimizer__weight_decay": 0})
    )
    assert isinstance(built.sampling.temperature, float) and isinstance(built.objective.epsilon_high, float)
    assert from_config_dict(changed_unsafely({"objective__epsilon_high": None})).objective.epsilon_high is None


def test_profile_steps():
    assert profile_steps(ProfileSettings("3:5")) == range(3, 5)
    assert profile_steps(ProfileSettings()) == range(0)


def test_a_missing_wandb_is_named_before_anything_else(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    page = default_config()
    page.logging.wandb = "project"
    with pytest.raises(ConfigError, match=r"config\.logging\.wandb.*pip install wandb"):
        from_config_dict(page)
