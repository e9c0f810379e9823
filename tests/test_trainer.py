"""The loop end to end on a debug-size model, in process: files, metrics, hooks, and the features that enter through settings."""

import collections
import json

import compilations
import debug_run
import jax
import numpy as np
import pytest

from cispo_jax import building, trainer
from cispo_jax.config import ConfigError
from cispo_jax.reporting import UPDATE_METRICS
from cispo_jax.rewards import Scorer
from cispo_jax.sampling import sample_groups

STEP_METRICS = """reward/mean policy/entropy policy/ratio_mean policy/ratio_max policy/rollout_mismatch_max
policy/rollout_mismatch_p99 policy/rollout_mismatch_mean
clip/dropped_ppo clip/dropped_dapo clip/at_cap grad/norm loss updates responses tokens/generated time/sample time/score time/train time/step
reward/unscored groups/sampled groups/trained response/length response/truncated optimizer/learning_rate""".split()
SAPO = '''
import jax, jax.numpy as jnp
import cispo_jax

def sapo_loss(log_probs, old_log_probs, advantages, loss_mask, *, aggregation="sequence", temperature_pos=1.0, temperature_neg=1.05,
              **groups):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (arXiv:2511.20347)."""
    mask = jnp.asarray(loss_mask, bool)
    A = jnp.broadcast_to(jnp.asarray(advantages).reshape(len(advantages), -1), mask.shape)
    r = jnp.exp(jnp.where(mask, log_probs - old_log_probs, 0.0))
    tau = jnp.where(A > 0, temperature_pos, temperature_neg)
    term = -4 / tau * jax.nn.sigmoid(tau * (r - 1)) * A
    if isinstance(aggregation, str):
        aggregation = cispo_jax.aggregation_weights(mask, aggregation=aggregation, **groups)
    loss = jnp.sum(jnp.where(mask, aggregation * term, 0.0))
    return loss, {"gate": jnp.mean(r)}
'''


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    debug_run.on_one_device(monkeypatch)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def samples(workdir, step):
    return [json.loads(line) for line in (workdir / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


def digits(responses, *, examples, finish_reasons, response_tokens):
    """Share of digits: learnable within a few steps, and different within most groups."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in responses]


@pytest.fixture(scope="module")
def debug(tmp_path_factory):
    """One run of three steps with everything on; tests read what it left."""
    workdir = tmp_path_factory.mktemp("debug")
    with pytest.MonkeyPatch.context() as patch:
        debug_run.on_one_device(patch)
        built, compiled = [], []
        build, rollout_step = building.build, trainer.rollout_step
        patch.setattr(building, "build", lambda *a, **k: built.append(build(*a, **k)) or built[-1])
        patch.setattr(trainer, "rollout_step", lambda *a: compiled.append(compilations.count()) or rollout_step(*a))
        settings = debug_run.config(
            num_steps=3, logging__tensorboard=True, evaluation__every=2, evaluation__samples=2, objective__num_minibatches=2,
            objective__num_epochs=2, sampling__dynamic=True, sampling__max_refills=2,
        )  # fmt: skip
        metrics = trainer.train(settings, workdir, dataset=debug_run.SUMS, reward=digits)
        compiled.append(compilations.count())
    return workdir, compiled, built[0], metrics


def test_the_run_directory(debug):
    workdir, _, _, metrics = debug
    names = {path.name for path in workdir.iterdir()}
    assert {"config.json", "metrics.jsonl", "rollouts", "checkpoints", "tensorboard", "evaluations"} <= names
    assert json.loads((workdir / "config.json").read_text())["sampling"]["group_size"] == 4
    found = lines(workdir)
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    assert list(workdir.glob("tensorboard/events.*"))
    assert metrics["loss"] == found[-1]["loss"]
    assert not list(workdir.glob("discarded/*"))


def test_every_promised_metric_is_in_every_line(debug):
    found = lines(debug[0])
    for line in found[1:]:
        assert not [name for name in STEP_METRICS if name not in line]
        assert all(value is None or np.isfinite(value) for value in line.values())
        assert line["updates"] == 4 and {f"clip/dropped_ppo/u{i:02d}" for i in range(4)} <= set(line)
        assert line["policy/rollout_mismatch_max"] < 1e-4
        assert line["time/step"] >= line["time/train"] > 0
        np.testing.assert_allclose(line["policy/ratio_mean/u00"], 1, atol=1e-5)
    evaluated = [line["step"] for line in found if "eval/accuracy" in line]
    assert evaluated == [0, 2, 3] and all("eval/avg@2" in found[step] for step in evaluated)
    assert "loss" not in found[0]
    assert any(line["policy/ratio_max"] > 1.0001 for line in found[1:])  # later updates are off-policy


def test_sampled_responses_can_be_read(debug):
    workdir = debug[0]
    for step in (1, 2, 3):
        rows, line = samples(workdir, step), lines(workdir)[step]
        assert len(rows) == line["responses"] == line["groups/sampled"] * 4
        assert {"prompt", "response", "reward", "parts", "finish_reason"} <= set(rows[0])
        assert sum(row["tokens"] for row in rows) == line["tokens/generated"]
        np.testing.assert_allclose(np.mean([row["reward"] for row in rows]), line["reward/mean"])
        for group in range(0, len(rows), 4):
            assert len({row["prompt"] for row in rows[group : group + 4]}) == 1
        assert all(row["reward"] == row["parts"]["digits"] for row in rows)


def test_nothing_compiles_after_the_first_step(debug):
    """Whatever is compiled, also outside our own functions; steps 2 and 3 hold an evaluation, a checkpoint, maybe a refill."""
    _, compiled, _, _ = debug
    first, second, *later = compiled
    assert second > first  # the listener hears compilations
    assert set(later) == {second}, compiled


def test_prompts_follow_the_stream_without_repeats(debug):
    workdir, _, run, _ = debug
    prompts = [
        samples(workdir, step)[i]["prompt"] for step in (1, 2, 3) for i in range(0, len(samples(workdir, step)), 4)
    ]
    assert prompts == [run.stream[i]["prompt"] for i in range(len(prompts))]
    assert len(set(prompts)) == len(prompts)  # within the first epoch


def test_held_out_problems_are_not_trained_on(debug):
    workdir, _, run, _ = debug
    held_out = {example["prompt"] for example in run.problems.evaluation}
    assert not held_out & {row["prompt"] for step in (1, 2, 3) for row in samples(workdir, step)}


# ---- features that enter through settings, arguments and files


def run(tmp_path, *, reward=digits, steps=2, **changes):
    arguments = {k: changes.pop(k) for k in ("objective", "model", "sample_fn", "dataset") if k in changes}
    settings = debug_run.config(num_steps=steps, **changes)
    trainer.train(settings, tmp_path, **{"dataset": debug_run.SUMS, "reward": reward, **arguments})
    return lines(tmp_path)


def test_unscored_rows_are_counted_and_leave_the_loss(tmp_path):
    def sometimes(responses, *, examples, finish_reasons, response_tokens):
        values = digits(responses, examples=examples, finish_reasons=finish_reasons, response_tokens=response_tokens)
        return [None if i % 4 == 1 or i >= 12 else value for i, value in enumerate(values)]

    found = run(tmp_path, reward=sometimes, steps=1, sampling__dynamic=False)
    assert found[1]["reward/unscored"] == 3 + 4 and found[1]["responses"] == 16
    rewards = [row["reward"] for row in samples(tmp_path, 1)]
    assert rewards.count(None) == 7
    np.testing.assert_allclose(found[1]["reward/mean"], np.mean([r for r in rewards if r is not None]))
    assert found[1]["updates"] == 3  # the group without a score is a mini-batch without a token


def test_groups_are_scored_while_others_are_sampled_and_nothing_else_changes(tmp_path, monkeypatch):
    """With slots and workers; once without workers. Nothing is compiled after the first step."""
    begun: list[int] = []
    begin = Scorer.begin

    def recorded(self, *rows):
        begun.append(rows[1][0]["id"])
        begin(self, *rows)

    monkeypatch.setattr(Scorer, "begin", recorded)
    changes = dict(reward=None, sampling__slots=4, sampling__sync_tokens=2, steps=3)
    task = dict(rewards__task="on", sampling__dynamic=False)
    inline = run(tmp_path / "inline", **changes, **task)
    assert len(begun) == len(inline[1:]) * 4
    before = compilations.count()
    overlapped = run(tmp_path / "overlapped", rewards__workers=1, **changes, **task)
    assert len(begun) == 2 * len(inline[1:]) * 4
    of_first = compilations.count() - before
    fixed = lambda lines: [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "tokens/per"))} for line in lines
    ]
    assert fixed(overlapped) == fixed(inline)
    before = compilations.count()
    run(tmp_path / "longer", **changes | {"steps": 4}, **task)
    assert compilations.count() - before == of_first, "one step more, no compilation more"


def test_a_reward_that_fails_on_some_examples_costs_their_groups_only(tmp_path):
    def fragile(responses, *, examples, **_):
        if examples[0]["prompt"].startswith(("2", "3")):
            raise RuntimeError("cannot")
        return digits(responses, examples=examples, finish_reasons=[], response_tokens=[])

    dataset = [e for e in debug_run.SUMS if not e["prompt"].startswith("4")]
    try:
        found = run(tmp_path, reward=fragile, steps=2, dataset=dataset, evaluation__num_problems=0)
    except ConfigError as error:  # the trial call before training may meet such an example
        assert "trial call" in str(error)
        return
    assert all(np.isfinite(line["loss"]) for line in found[1:] if line.get("updates"))


def test_a_reward_that_calls_exit_costs_its_groups_and_not_the_run(tmp_path):
    """`sys.exit()` in a user's function would end the command as if it were done."""

    def leaves(responses, *, examples, **_):
        if examples[0]["prompt"].startswith("2"):
            raise SystemExit
        return digits(responses, examples=examples, finish_reasons=[], response_tokens=[])

    found = run(tmp_path, reward=leaves, steps=1, dataset=[e for e in debug_run.SUMS if e["prompt"][0] in "235"][::-1])
    assert len(found) == 2


def test_settings_that_a_checkpoint_does_not_fit_change_nothing(tmp_path):
    run(tmp_path, steps=1)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"checkpoints/1 cannot be restored.*config\.model"):
        run(tmp_path, steps=2, model__preset="tiny")
    assert (tmp_path / "config.json").read_bytes() == before
    (tmp_path / "config.json").write_text("")  # as a full disk once left it
    assert len(run(tmp_path, steps=2)) == 3


def test_a_reward_of_the_wrong_length_ends_the_run_with_its_name(tmp_path):
    def wrong_length(responses, **_):
        return [1.0] * (len(responses) + 1)

    with pytest.raises(ConfigError, match="wrong_length"):
        run(tmp_path, reward=wrong_length)


def test_without_any_signal_nothing_moves(tmp_path):
    """Every reward equal, dynamic sampling, refills run out: no update, and the line still holds every metric."""
    found = run(
        tmp_path, reward=lambda responses, **_: [1.0] * len(responses), sampling__dynamic=True, sampling__max_refills=2
    )
    for line in found[1:]:
        assert line["updates"] == 0 and line["groups/trained"] == 0 and line["groups/sampled"] == 12
        assert line["responses"] == 48 and line["reward/mean"] == 1
        assert not [name for name in STEP_METRICS if name not in line]
        nothing = [name for name in UPDATE_METRICS if line[name] is not None]
        assert not nothing  # null, not a 0 that looks like a measurement


def test_a_mini_batch_without_a_trained_token_takes_no_step(tmp_path):
    """Only the first group of the four has different rewards."""

    def one_group(responses, **_):
        return [float(i == 0) for i in range(len(responses))]

    found = run(tmp_path, reward=one_group, steps=1, sampling__dynamic=True)
    assert found[1]["groups/trained"] == 1 and found[1]["updates"] == 1
    assert "loss" in found[1] and "grad/norm/u00" in found[1] and "grad/norm/u01" not in found[1]


def test_truncated_responses_may_leave_the_loss_but_not_the_statistics(tmp_path, monkeypatch):
    batches = []
    build = building.build

    def spy(*a, **k):
        built = build(*a, **k)
        pack = built.pack
        built.pack = lambda batch: batches.append(batch) or pack(batch)
        return built

    monkeypatch.setattr(building, "build", spy)
    found = run(tmp_path, steps=1, objective__train_truncated=False, objective__num_minibatches=1)
    rows = samples(tmp_path, 1)
    truncated = np.array([row["finish_reason"] == "length" for row in rows])
    assert 0 < truncated.sum() < len(rows)
    loss_mask, advantages = batches[-1].loss_mask, batches[-1].advantages
    # All groups are live, in one mini-batch: rows stay in the order in which they were sampled.
    assert not loss_mask[truncated].any() and loss_mask[~truncated].any(axis=1).all()
    rewards = np.array([row["reward"] for row in rows]).reshape(4, 4)
    std = rewards.std(axis=1, ddof=1, keepdims=True)
    np.testing.assert_allclose(
        advantages.reshape(4, 4),
        (rewards - rewards.mean(axis=1, keepdims=True)) / (std + 1e-6),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(found[1]["response/truncated"], truncated.mean())


@pytest.mark.parametrize(
    "changes",
    [
        dict(objective__num_minibatches=1, objective__num_epochs=4, objective__anchor="rollout", objective__micro_batch_tokens=1,
             objective__name="unified", objective__mask_epsilon_high=0.28, objective__aggregation="constant",
             objective__advantage_scale="none"),
        dict(objective__name="gspo", objective__advantage="rloo", objective__truncated_importance_cap=2.0, model__dtype="bfloat16",
             model__remat="full"),
    ],
    ids=["epochs_rollout_unified_constant", "gspo_rloo_cap_bf16"],
)  # fmt: skip
def test_settings_train(tmp_path, changes):
    found = run(tmp_path, steps=1, **changes)
    line = found[1]
    assert line["updates"] == 4 and np.isfinite(line["loss"]) and line["grad/norm"] > 0
    assert not [name for name in STEP_METRICS if name not in line]
    limit = 0.05 if changes.get("model__dtype") else 1e-4
    assert line["policy/rollout_mismatch_max"] < limit and "policy/rollout_mismatch_p99" in line


def test_old_log_probs_stay_frozen_and_the_anchor_is_what_the_setting_says(tmp_path, monkeypatch):
    batches = []
    build = building.build

    def spy(*a, **k):
        built = build(*a, **k)
        step, sample = built.train_step, built.sample
        built.train_step = lambda state, batch, rate: batches.append(jax.device_get(batch)) or step(state, batch, rate)

        def shifted(*a, **k):  # a sampler whose record is off by 0.25
            import dataclasses

            rollout = sample(*a, **k)
            return dataclasses.replace(
                rollout, log_probs=np.where(rollout.response_mask, rollout.log_probs - 0.25, 0).astype(np.float32)
            )

        built.sample = shifted
        return built

    monkeypatch.setattr(building, "build", spy)
    for anchor in ("old", "rollout"):
        batches.clear()
        found = run(tmp_path / anchor, steps=1, objective__anchor=anchor, objective__num_epochs=3)
        np.testing.assert_allclose(found[1]["policy/rollout_mismatch_max"], np.exp(0.25) - 1, rtol=1e-3)
        assert len(batches) == 12
        frozen = {batch.tokens.tobytes(): batch.old_log_probs for batch in batches[:4]}
        for batch in batches[4:]:  # later epochs, in another order
            np.testing.assert_array_equal(batch.old_log_probs, frozen[batch.tokens.tobytes()])
        difference = (batches[0].old_log_probs - batches[0].rollout_log_probs)[batches[0].loss_mask]
        np.testing.assert_allclose(difference, 0.25 if anchor == "old" else 0, atol=1e-4)
        np.testing.assert_allclose(found[1]["policy/ratio_mean/u00"], 1 if anchor == "old" else np.exp(0.25), rtol=1e-4)


def test_shuffled_rewards_are_a_permutation(tmp_path):
    run(tmp_path / "plain", steps=1)
    run(tmp_path / "shuffled", steps=1, sampling__shuffle_rewards=True)
    plain, shuffled = (samples(tmp_path / name, 1) for name in ("plain", "shuffled"))
    assert [row["response"] for row in plain] == [row["response"] for row in shuffled]
    rewards = [[row["reward"] for row in rows] for rows in (plain, shuffled)]
    assert rewards[0] != rewards[1] and sorted(rewards[0]) == sorted(rewards[1])


def test_arguments_of_the_python_entry_point(tmp_path):
    """model=, sample_fn= (ours, as documented), objective= and dataset= in one run."""
    import dataclasses

    from cispo_jax import cispo_loss
    from cispo_jax.models import PRESETS

    calls = collections.Counter()
    settings = debug_run.config()
    vocab = debug_run.build(settings).tokenizer.vocab_size
    start = debug_run.model(dataclasses.replace(PRESETS["debug"], vocab_size=vocab))

    def sampler(model, prompts, *, group_size, temperature, seed, step, prompt_ids, **options):
        calls["sample"] += 1
        defaults = dict(max_new_tokens=8, eos_ids=[1], prompt_width=4)
        return sample_groups(
            model,
            prompts,
            group_size=group_size,
            temperature=temperature,
            seed=seed,
            step=step,
            prompt_ids=prompt_ids,
            **(defaults | options),
        )

    def objective(*arrays, **options):
        calls["objective"] += 1
        return cispo_loss(*arrays, **options)

    found = run(
        tmp_path,
        steps=1,
        model=start,
        sample_fn=sampler,
        objective=objective,
        model__preset="nonsense",
    )
    assert calls["sample"] >= 2 and calls["objective"] >= 1 and found[1]["updates"] == 4


def test_an_objective_outside_the_package_trains_with_all_diagnostics(tmp_path):
    """SAPO (arXiv:2511.20347) in twenty lines, by file name."""
    (tmp_path / "sapo.py").write_text(SAPO)
    found = run(
        tmp_path / "run", steps=1, objective__name=f"{tmp_path}/sapo.py:sapo_loss", objective__micro_batch_tokens=2
    )
    line = found[1]
    assert line["updates"] == 4 and line["grad/norm"] > 0
    assert not [name for name in STEP_METRICS if name not in line]


def test_an_objective_that_reduces_by_itself_trains_whole_minibatches_only(tmp_path):
    def own_mean(log_probs, old_log_probs, advantages, loss_mask, *, aggregation="token", **_):
        term = jax.numpy.where(loss_mask, log_probs * advantages[:, None], 0)
        return -term.sum() / loss_mask.sum(), {}

    with pytest.raises(ConfigError, match="micro_batch_tokens=2"):
        run(tmp_path / "a", objective=own_mean, objective__micro_batch_tokens=2)
    assert not (tmp_path / "a").exists()
    assert run(tmp_path / "b", objective=own_mean, steps=1)[1]["updates"] == 4


@pytest.mark.parametrize("broken", ["returns_scalar", "no_aggregation", "raises"])
def test_a_broken_objective_is_refused_before_training(tmp_path, broken):
    functions = {
        "returns_scalar": lambda lp, old, a, m, *, aggregation="token", **k: (lp * aggregation).sum(),
        "no_aggregation": lambda lp, old, a, m: (lp.sum(), {}),
        "raises": lambda lp, old, a, m, *, aggregation="token": 1 / 0,
    }
    with pytest.raises(ConfigError, match="objective"):
        run(tmp_path / "run", objective=functions[broken])
    assert not (tmp_path / "run").exists()


def test_rewards_rise_when_there_is_something_to_learn(tmp_path):
    """Digits only is an easy habit; a few steps of CISPO teach it to a random model."""
    found = run(tmp_path, steps=15, optimizer__learning_rate=1e-2, checkpoint__every=50)
    rewards = [line["reward/mean"] for line in found[1:]]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


def test_a_trace_that_the_run_does_not_reach_the_end_of_is_still_written(tmp_path):
    run(tmp_path, steps=1, profile__steps="1:9")
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))


@pytest.mark.slow
def test_a_step_runs_without_jit(tmp_path):
    """`JAX_DISABLE_JIT=1` with the debug page: every line can be stepped through, and the numbers are the compiled ones."""
    small = dict(steps=1, sampling__prompts_per_step=2, sampling__group_size=2, sampling__max_new_tokens=3, objective__num_minibatches=1,
                 evaluation__num_problems=2)  # fmt: skip
    compiled = run(tmp_path / "compiled", **small)
    with jax.disable_jit():
        plain = run(tmp_path / "plain", **small)
    assert samples(tmp_path / "plain", 1) == samples(tmp_path / "compiled", 1)
    for name in ("loss", "grad/norm", "policy/entropy", "reward/mean"):
        np.testing.assert_allclose(plain[1][name], compiled[1][name], rtol=1e-4, atol=1e-6)
