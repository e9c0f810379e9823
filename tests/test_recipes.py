"""Published recipes on the debug model: what they set, what they say, and that they train; the reference policy and the length schedule."""

import json

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cispo_jax import building, cispo_loss, trainer
from cispo_jax.config import ConfigError, from_config_dict
from cispo_jax.training import packing
from cispo_jax.training.packing import Layout
from cispo_jax.training.train_step import make_train_step
from cispo_jax.types import TrainState
from configs import debug
from configs.common.recipes import RECIPES


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    debug_run.on_one_device(monkeypatch)


SMALL = dict(prompts=4, group_size=4, learning_rate=1e-3)
SAID = {
    "grpo": "objective grpo: ratio in [0.8, 1.2], sequence aggregation, anchor old; advantages by group, scaled by group; 1 updates a "
    "batch (1 mini-batches x 1 epochs); warm-up 0 rollout steps = 0 updates; KL to the starting weights 0.04 x k3; truncated responses "
    "kept",
    "dapo": "objective dapo: ratio in [0.8, 1.28], token aggregation, anchor old; advantages by group, scaled by group; 4 updates a batch "
    "(4 mini-batches x 1 epochs); warm-up 20 rollout steps = 80 updates; truncated responses kept, penalised over the last 1 tokens",
    "cispo_m1": "objective cispo: ratio in [0, 5], prompt aggregation, anchor old; advantages by group, scaled by group; 16 "
    "updates a batch (1 mini-batches x 16 epochs); warm-up 20 rollout steps = 320 updates; truncated responses kept, penalised over the "
    "last 1 tokens",
    "cispo_scalerl": "objective cispo: ratio in [0, 5], prompt aggregation, anchor rollout; advantages by group, scaled by batch; "
    "1 updates a batch (1 mini-batches x 1 epochs); warm-up 100 rollout steps = 100 updates; truncated responses kept",
}
UPDATES = {"grpo": {}, "dapo": {"minibatches": 4}, "cispo_m1": {"minibatches": 1, "epochs": 16}, "cispo_scalerl": {}}


def page(name, **options):
    config = debug.get_config()
    RECIPES[name](config, **SMALL | UPDATES[name] | options)
    config.num_steps = 2
    config.sampling.max_refills = min(config.sampling.max_refills, 2)
    config.sampling.dynamic = False  # a debug model rarely has a group of two different rewards
    config.evaluation.every = 0
    config.evaluation.samples = 0
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_two_steps_and_says_what_it_does(name, tmp_path, capsys):
    trainer.train(page(name), tmp_path, reward=by_length)
    assert " ".join(SAID[name].split()) in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["updates"] for line in lines] == [
        UPDATES[name].get("minibatches", 1) * UPDATES[name].get("epochs", 1)
    ] * 2
    assert all(np.isfinite(line["loss"]) and line["grad/norm"] > 0 for line in lines)
    assert ("policy/kl_reference" in lines[0]) == (name == "grpo")
    assert ("reward/overlong" in lines[0]) is False  # `reward=` replaces the parts


def by_length(responses, **_):
    return [float(len(text) % 3) for text in responses]


def test_a_recipe_composes_with_any_page():
    from configs import from_scratch, quickstart, tiny_moe

    for base in (quickstart, from_scratch, tiny_moe):
        for name, recipe in RECIPES.items():
            config = base.get_config()
            recipe(config, prompts=16, group_size=4, **UPDATES[name])
            assert from_config_dict(config).objective.name in ("grpo", "dapo", "cispo")


def test_the_penalty_grows_from_zero_and_the_reference_stays(tmp_path):
    config = page("grpo", kl=1e-9)  # measured, but without an effect
    config.num_steps = 4
    trainer.train(config, tmp_path / "a", reward=by_length)
    kl = [
        json.loads(line)["policy/kl_reference"] for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()[1:]
    ]
    assert abs(kl[0]) < 1e-6 and 0 < kl[1] < kl[3]
    config = page("grpo", kl=10.0)
    config.num_steps = 4
    trainer.train(config, tmp_path / "b", reward=by_length)
    held = [
        json.loads(line)["policy/kl_reference"] for line in (tmp_path / "b/metrics.jsonl").read_text().splitlines()[1:]
    ]
    assert held[3] < kl[3]


def test_a_resumed_run_holds_on_to_the_same_reference(tmp_path):
    config = page("grpo", kl=0.5)
    config.num_steps = 4
    trainer.train(config, tmp_path / "whole", reward=by_length)
    config.num_steps = 2
    trainer.train(config, tmp_path / "parts", reward=by_length)
    config.num_steps = 4
    trainer.train(config, tmp_path / "parts", reward=by_length)
    whole, parts = (
        [json.loads(line) for line in (tmp_path / d / "metrics.jsonl").read_text().splitlines()]
        for d in ("whole", "parts")
    )
    same = lambda line: {
        k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "tokens/per", "optimizer/", "eval/"))
    }
    assert [same(line) for line in whole] == [same(line) for line in parts]


def test_the_gradient_is_that_of_loss_and_penalty():
    """The update of a policy that is its own table of log-probs, over two passes, by gradient descent."""
    rng = np.random.default_rng(0)
    shapes = packing.shapes(Layout(2, 1, 1, 4, 6, 2, True, True), reference=True)
    normal = lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.3
    rows = shapes._replace(
        **{name: normal(getattr(shapes, name)) for name in ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")},
        loss_mask=rng.random((2, 1, 6)) < 0.7, coefficients=rng.random((2, 1, 6)).astype(np.float32), passes=np.int32(2),
        response_ids=np.tile([1, 1, 1, 2, 2, 2], (2, 1, 1)), tokens=np.arange(2).reshape(2, 1, 1) * np.ones((2, 1, 4), np.int32),
    )  # fmt: skip
    rows = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, rows)
    table = normal(shapes.old_log_probs)

    def log_probs_fn(model, of_pass):
        return model[of_pass.tokens[0, 0]], jnp.zeros((1, 6)), None

    def loss(table, kl):
        mask, coefficients = (x.reshape(2, 6) for x in (rows.loss_mask, rows.coefficients))
        of = lambda x: x.reshape(2, 6)
        value, _ = cispo_loss(of(table), of(rows.old_log_probs), of(rows.advantages), mask, aggregation=coefficients)
        d = of(rows.ref_log_probs) - of(table)
        return value + kl * jnp.sum(jnp.where(mask, coefficients * (jnp.exp(d) - d - 1), 0))

    for kl in (0.0, 0.7):
        step = make_train_step(log_probs_fn, cispo_loss, optax.identity(), kl=kl)
        state, metrics = step(TrainState(jnp.int32(0), jnp.array(table), optax.EmptyState()), rows, np.float32(1.0))
        np.testing.assert_allclose(table - state.model, jax.grad(loss)(table, kl), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metrics["loss"], loss(table, kl), rtol=1e-5)
        if kl:
            total, count = metrics["sums"]["policy/kl_reference"]
            d = (rows.ref_log_probs - table)[rows.loss_mask]
            np.testing.assert_allclose(total / count, np.mean(np.exp(d) - d - 1), rtol=1e-5)


@pytest.mark.parametrize("slots", [0, 8])
def test_the_length_schedule_ends_responses_earlier(tmp_path, slots):
    config = page("cispo_m1", overlong=0.0)
    config.num_steps = 3
    config.sampling.slots = slots
    config.sampling.length_schedule = {"1": 2, "3": 5}
    trainer.train(config, tmp_path, reward=by_length)
    longest = {}
    for step in (1, 2, 3):
        rows = [json.loads(line) for line in (tmp_path / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]
        longest[step] = max(row["tokens"] for row in rows)
        assert all(
            (row["finish_reason"] == "length") == (row["tokens"] == longest[step])
            for row in rows
            if row["finish_reason"] != "stop"
        )
    assert longest == {1: 2, 2: 2, 3: 5}


def test_the_overlong_penalty_ends_where_the_schedule_does():
    config = page("dapo")
    config.rewards.overlong_buffer = 2
    config.sampling.length_schedule = {"1": 4}
    run = building.build(from_config_dict(config))
    examples = [{"id": "0", "prompt": "1+1=", "answer": "2"}] * 3
    _, parts = run.score(["2"] * 3, examples, ["stop"] * 3, [2, 3, 4], run.config.sampling.limit(1))
    assert parts["overlong"] == [0.0, -0.25, -0.5]


@pytest.mark.parametrize(
    "schedule, message",
    [
        ({"1": 7}, "length_schedule.1=7: valid values are 1 to config.sampling.max_new_tokens=6"),
        ({"1": 0}, "length_schedule.1=0"),
        ({"one": 3}, "length_schedule.one=3: a rollout step and a number"),
        ({"1": "long"}, "length_schedule.1='long'"),
    ],
)
def test_schedules_that_cannot_work(schedule, message):
    config = debug.get_config()
    config.sampling.length_schedule = schedule
    with pytest.raises(ConfigError, match=message):
        from_config_dict(config)


def test_the_reference_of_a_warm_start_is_refused(tmp_path):
    config = page("grpo")
    config.sft.num_steps = 2
    with pytest.raises(ConfigError, match="not of the warm start"):
        building.build(from_config_dict(config))


def test_a_truncated_weight_beside_the_rollout_anchor_is_refused():
    config = page("cispo_scalerl")
    config.objective.truncated_importance_cap = 2.0
    with pytest.raises(ConfigError, match="would count it twice"):
        from_config_dict(config)


@pytest.mark.parametrize(
    "name, said",
    [
        ("cispo", "objective cispo: ratio in [0, 5], token"),
        ("reinforce", "objective reinforce: ratio in [0, inf], sequence"),
        ("ppo", "objective ppo: ratio in [0.8, 1.2], token"),
        ("gspo", "objective gspo: ratio in [0.9997, 1.0004], sequence"),
        ("unified", "objective unified: ratio in [0, 5], token"),
    ],
)
def test_bounds_of_every_objective_are_said(name, said):
    config = debug.get_config()
    config.objective.name = name
    assert building.build(from_config_dict(config)).notes[0].startswith(said)


def test_an_objective_from_python_is_said_to_be_one():
    config = from_config_dict(debug.get_config())
    assert building.build(config, objective=cispo_loss).notes[0].startswith("objective of your own, token aggregation")
