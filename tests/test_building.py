"""From settings to functions: what is refused before device work, and that its pieces fit each other."""

import dataclasses

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import building, diagnostics, models
from cispo_jax.config import ConfigError
from cispo_jax.models import PRESETS


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    debug_run.on_one_device(monkeypatch)


def refused(*words, **changes):
    arguments = {k: changes.pop(k) for k in ("objective", "model", "reward", "dataset") if k in changes}
    with pytest.raises(ConfigError) as error:
        debug_run.build(debug_run.config(**changes), **arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_bad_settings():
    refused("config.model.preset='debgu'", '"debug"', "tiny", model__preset="debgu")
    refused("config.objective.name='grop'", '"grpo"', objective__name="grop")
    refused("config.model.tokenizer", model__tokenizer="")
    refused("mesh.data=3", mesh__data=3)
    refused("empty", dataset=[])
    refused("config.data.max_prompt_tokens=3", data__max_prompt_tokens=3)
    refused("response", sft__num_steps=1)
    refused("trial call", reward=lambda responses, **_: 1 / 0)
    refused("signature", objective=lambda log_probs, old, advantages, mask: (0.0, {}))
    three = lambda log_probs, old, advantages, mask, *, aggregation: (log_probs.sum(), {}, {})
    refused("config.objective.name", "(loss, metrics)", objective=three)
    whole = lambda log_probs, old, advantages, mask, *, aggregation: (mask.sum(), {})
    refused("config.objective.name", "real", objective=whole)  # an integer loss has no gradient


def test_bad_benchmarks(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    sets = lambda **table: {"evaluation__sets": {"sums": {"source": str(file)} | table}}
    refused("config.evaluation.sets.sums.sampels", '"samples"', **sets(sampels=2))
    refused("config.evaluation.sets.sums.samples='two'", "type int", **sets(samples="two"))
    refused("config.evaluation.top_p=0.0", **sets(top_p=0.0))
    refused("config.evaluation.sets.sums.prompt_suffix=3", **sets(prompt_suffix=3))
    refused("config.evaluation.sets.sums.verifier='maths'", '"math"', **sets(verifier="maths"))
    refused("config.evaluation.sets.sums.source", "no such file", **sets(source=str(tmp_path / "sum.jsonl")))
    refused("must be a table with a source", evaluation__sets={"sums": 3})
    run = debug_run.build(debug_run.config(**sets(samples=3, top_p=0.5, num_problems=1)))
    own, benchmark = run.benchmarks
    assert (own.name, benchmark.name, len(benchmark.examples)) == ("", "sums", 2)
    assert (benchmark.settings.samples, benchmark.settings.top_p, benchmark.settings.num_problems) == (3, 0.5, 1)
    assert own.settings.samples != 3


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    """jax clamps an id outside the embedding silently."""
    small = debug_run.model(dataclasses.replace(PRESETS["debug"], vocab_size=7))
    refused("config.model.tokenizer", "16 tokens", "only 7", model=small)


@pytest.mark.parametrize("sizes", [dict(tensor=2, fsdp=2), dict(tensor=4, fsdp=1), dict(fsdp=4)])
def test_a_mesh_works_or_is_refused_by_name(monkeypatch, sizes):
    """Heads or a vocabulary that do not split over `tensor` must not end in a traceback of XLA's."""
    debug_run.on_devices(monkeypatch, 4)
    changes = {f"mesh__{axis}": size for axis, size in sizes.items()}
    try:
        run = debug_run.build(debug_run.config(**changes))
        jax.block_until_ready(run.make_model())
    except ConfigError as error:
        assert "mesh.tensor" in str(error)


def test_fewer_responses_than_devices_are_refused(monkeypatch):
    debug_run.on_devices(monkeypatch, 4)
    refused("config.sampling.group_size=3", "4 devices", mesh__fsdp=4, sampling__group_size=3)


MIXED = [*debug_run.SUMS, *({"id": f"{a}", "prompt": f"{a}+10=", "answer": str(a + 10)} for a in range(95, 105))]


@pytest.mark.parametrize(
    ("temperature", "dtype"), [(0.6, "float32"), (1.0, "float32"), (1.3, "float32"), (1.3, "bfloat16")]
)
def test_sampler_and_trainer_agree_on_log_probs(temperature, dtype):
    """The acceptance's bounds on |ratio - 1| with unchanged weights, over prompts of mixed lengths, as the run logs it."""
    settings = debug_run.config(sampling__temperature=temperature, model__dtype=dtype)
    start = debug_run.model(
        dataclasses.replace(PRESETS["debug"], vocab_size=16, tied_head=False)
    )  # unlike fresh weights
    run = debug_run.build(settings, dataset=MIXED, model=start)
    model = run.make_model()
    prompts = [run.encode(example) for example in MIXED[-16:]]
    assert len({len(prompt) for prompt in prompts}) > 1 and run.tokenizer.vocab_size <= 16
    rollout = run.sample(
        run.to_sampling(model), prompts, group_size=4, temperature=temperature, seed=0, step=1, prompt_ids=range(16)
    )
    assert rollout.prompt_tokens.shape == (64, run.prompt_width)
    width = rollout.response_tokens.shape[1]
    scored = debug_run.packed_log_probs(model, *debug_run.rows_of(rollout), width, group_size=4, score=run.score_step)
    mask = rollout.loss_mask
    mismatch = diagnostics.rollout_mismatch(scored, rollout.log_probs, mask)
    assert rollout.log_probs[mask].std() > 0.5  # not the uniform distribution
    ratio = np.exp(np.asarray(scored, np.float64) - rollout.log_probs)[mask]
    np.testing.assert_allclose(mismatch["policy/rollout_mismatch_max"], np.abs(ratio - 1).max(), rtol=1e-3, atol=1e-6)
    if dtype == "float32":
        assert mismatch["policy/rollout_mismatch_p99"] < 1e-4 and mismatch["policy/rollout_mismatch_max"] < 1e-3
    else:
        assert 0 < mismatch["policy/rollout_mismatch_mean"] < 5e-3


def test_the_head_is_float32_under_bfloat16_compute():
    """The logits are those of a float32 product, on the states that the bfloat16 layers end in."""
    run = debug_run.build(debug_run.config(model__dtype="bfloat16"), model=debug_run.model(PRESETS["debug"]))
    model = debug_run.model(PRESETS["debug"])
    tokens = np.random.default_rng(0).integers(0, 16, (4, 9)).astype(np.int32)
    mask = np.ones((4, 9), bool)
    log_probs = debug_run.packed_log_probs(model, tokens, mask, 5, group_size=1, score=run.score_step)
    states = jax.jit(lambda m: models.hidden_states(m, tokens, mask, dtype=jnp.bfloat16).hidden_BTD)(model)[:, -6:-1]

    def expected(head):
        logits = np.asarray(states, np.float64) @ head
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return np.take_along_axis(log_p, tokens[:, 4:, None], axis=-1)[..., 0]

    head = np.asarray(model.embedding[...]).T
    np.testing.assert_allclose(log_probs, expected(head.astype(np.float64)), atol=1e-5)
    rounded = np.asarray(jnp.asarray(head, jnp.bfloat16), np.float64)
    assert np.abs(expected(rounded) - log_probs).max() > 1e-3  # what a bfloat16 head would give


def test_demonstrations_end_with_the_end_token_and_fit():
    dataset = [e | {"response": e["answer"]} for e in debug_run.SUMS]
    run = debug_run.build(debug_run.config(sft__num_steps=1), dataset=dataset)
    prompt, response = building._demonstrations(run)(0)
    assert response[-1] == run.tokenizer.eos_ids[0] and run.tokenizer.decode(response) == run.stream[0]["response"]
    assert prompt == run.encode(run.stream[0])


def test_demonstrations_over_the_limit_are_refused_before_training():
    dataset = [e | {"response": "1" * 30} for e in debug_run.SUMS]
    refused("config.sampling.max_new_tokens=8", sft__num_steps=1, dataset=dataset)


def test_the_sampling_layout_leaves_what_the_trainer_computes_in_float32():
    """Norm scales act in float32 in the trainer: rounding them in the sampler is a mismatch that grows with training."""
    settings = debug_run.config(model__dtype="bfloat16")
    run = debug_run.build(settings)
    cast = jax.eval_shape(run.to_sampling, run.abstract_state.model)
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_flatten_with_path(cast)[0]}
    for name, dtype in dtypes.items():
        assert dtype == (jnp.float32 if "norm" in name or "embedding" in name else jnp.bfloat16), name
    assert sum("norm" in name for name in dtypes) == 3
