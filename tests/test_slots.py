"""Continuous batching: the rollout of the plain loop from any number of slots, its sizes, what it compiles, the repetition stop."""

import dataclasses

import compilations
import debug_run
import jax
import numpy as np
import pytest

from cispo_jax import sharding
from cispo_jax.config import ConfigError
from cispo_jax.sampling import sample_groups, slots
from cispo_jax.sampling.draw import LENGTH, REPETITION
from cispo_jax.types import FINISH_REASONS

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5, 8], [1, 2, 3], [7], [8, 8]]


def sample(model, prompts=PROMPTS, **options):
    defaults = dict(group_size=3, max_new_tokens=14, temperature=1.0, eos_ids=(2, 7), seed=0, prompt_width=5)
    return sample_groups(model, prompts, **{**defaults, **options})


def check_equal(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name == "log_probs":
            np.testing.assert_allclose(x, y, atol=2e-5, rtol=0)
        else:
            np.testing.assert_array_equal(x, y, err_msg=field.name)


@pytest.fixture
def small_sizes(monkeypatch):
    """Caches of 6 and 14 columns beside the prompt's, and rows down to a third, or to a ninth."""
    monkeypatch.setattr(slots, "FIRST_ROOM", 6)
    monkeypatch.setattr(slots, "FACTOR", 3)
    monkeypatch.setattr(slots, "LEAST_ROWS", 1)


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((None, 40), (None, 1), ("mixtral", 9))]


@pytest.mark.parametrize(("family", "count"), [(None, 5), ("minimax", 6), ("mixed", 6), *SLOW])
def test_any_number_of_slots_gives_the_plain_rollout(family, count, small_sizes):
    """Rows of all ages in one ring of columns, moved together and widened; a last batch of prompts that is not full."""
    model = debug_run.model(debug_run.TINY if family is None else debug_run.FAMILIES[family])
    record = family is not None
    plain = sample(model, record_experts=record)
    assert len(set(plain.lengths)) > 3 and set(plain.finish_reasons) == {"stop", "length"}
    check_equal(sample(model, slots=count, sync_tokens=4, record_experts=record), plain)


def test_one_slot_and_prompts_of_one_token(small_sizes):
    model = debug_run.model()
    options = dict(prompts=[[3], [7]], prompt_width=1, group_size=2)
    check_equal(sample(model, slots=1, **options), sample(model, **options))


def test_slots_split_over_devices(small_sizes):
    mesh = sharding.sampling_mesh(debug_run.mesh(data=2, fsdp=2, tensor=2))
    even = dataclasses.replace(debug_run.TINY, vocab_size=18)
    model, plain = debug_run.model(even), sample(debug_run.model(even))
    layout = sharding.state_shardings(jax.eval_shape(lambda: model), mesh, sharding.SAMPLING_RULES)
    run = sharding.OnMesh(mesh, sample)
    options = dict(shard_rows=lambda x: sharding.shard_rows(mesh, x), sync_tokens=4)
    check_equal(run(jax.device_put(model, layout), slots=12, **options), plain)
    with pytest.raises(ConfigError, match="slots=6: valid are multiples of the 4 devices"):
        run(model, slots=6, **options)


def test_nothing_is_compiled_after_the_first_rollout(small_sizes):
    """Whatever lengths come out: other weights, seeds, ends and limits of the repetition stop."""
    model = debug_run.model()
    sample(model, slots=5, sync_tokens=4)
    before = compilations.count()
    for seed in range(3):
        sample(
            debug_run.model(seed=seed), slots=5, sync_tokens=4, seed=seed, eos_ids=(seed + 3, 1), repetition_stop=seed
        )
    assert compilations.count() == before


def test_sizes():
    assert slots.row_sizes(64) == [64, 16, 4] and slots.row_sizes(8) == [8] and slots.row_sizes(1) == [1]
    assert slots.row_sizes(64, devices=8) == [64] and slots.row_sizes(192, devices=8) == [192, 48]
    assert slots.widths(5, 14) == [18] and slots.widths(1, 1024) == [1025]
    assert slots.widths(1, 2047) == [2048]
    assert slots.widths(101, 20_480) == [100 + n for n in (1_280, 5_120, 20_480)]


def test_the_host_sees_the_progress():
    ended: list[int] = []
    tokens: list[int] = []
    responses = {}

    def look(progress):
        ended.extend(progress.ended)
        tokens.append(int(progress.lengths.sum()))
        for row in progress.ended:
            length, reason = progress.lengths[row], progress.finish_reason[row]
            responses[row] = (progress.response_tokens[row, :length].tolist(), FINISH_REASONS[reason])

    rollout = sample(debug_run.model(), slots=5, sync_tokens=4, on_sync=look)
    assert sorted(ended) == list(range(21)) and len(tokens) >= 4
    assert tokens == sorted(tokens) and tokens[-1] == rollout.lengths.sum()
    expected = zip(rollout.responses(), rollout.finish_reasons, strict=True)
    assert [responses[row] for row in range(21)] == list(expected)


@pytest.mark.parametrize("count", [0, 5])
def test_a_certain_run_of_tokens_ends_a_response(count):
    """Peaked distributions: a response ends with the R-th in a row of probability above 0.99."""
    model = debug_run.model()
    options = dict(temperature=0.6, eos_ids=(), slots=count)
    free, stopped = sample(model, **options), sample(model, repetition_stop=4, **options)
    assert set(free.finish_reasons) == {"length"}
    lengths = []
    for row in range(len(free.lengths)):
        certain = free.log_probs[row] > np.log(0.99)
        ends = [t + 1 for t in range(3, 14) if certain[t - 3 : t + 1].all()]
        lengths.append(ends[0] if ends else 14)
        expected = REPETITION if ends else LENGTH
        assert stopped.finish_reason[row] == expected, row
        length = stopped.lengths[row]
        np.testing.assert_array_equal(stopped.response_tokens[row, :length], free.response_tokens[row, :length])
    assert stopped.lengths.tolist() == lengths and len(set(lengths)) > 1
    check_equal(sample(model, repetition_stop=1000, **options), free)


def test_an_end_wins_over_a_repetition_and_a_repetition_over_the_limit():
    model = debug_run.model()
    options = dict(temperature=0.05, prompts=PROMPTS[:1], group_size=1, repetition_stop=4)
    cut = sample(model, eos_ids=(), **options)
    assert cut.finish_reasons == ["repetition"]
    length = int(cut.lengths[0])
    last = int(cut.response_tokens[0, length - 1])
    at_the_limit = sample(model, eos_ids=(), max_new_tokens=length, **options)
    assert at_the_limit.finish_reasons == ["repetition"]
    ended = sample(model, eos_ids=(last,), **options)
    assert ended.finish_reasons == ["stop"] and ended.lengths[0] <= length


@pytest.mark.parametrize("options", [dict(slots=-1), dict(sync_tokens=0), dict(repetition_stop=-1)])
def test_what_cannot_be_is_refused_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        sample(debug_run.model(), **options)


def test_a_run_with_slots_samples_what_one_without_does():
    """Through the settings, on a mesh of its own: the programs of a run."""
    from cispo_jax import programs

    def rollout(**changes):
        settings = debug_run.config(sampling__max_new_tokens=14, **changes)
        mesh = debug_run.mesh(data=2)
        run = programs.make_programs(settings, debug_run.FAMILIES["mixtral"], mesh, prompt_width=5, eos_ids=(2, 7))
        model = run.to_sampling(jax.device_put(debug_run.model(debug_run.FAMILIES["mixtral"]), run.shardings.model))
        return run.sample(model, PROMPTS[:6], group_size=2, temperature=1.0, seed=1, step=2, record_experts=True)

    check_equal(rollout(sampling__slots=4), rollout())
    with pytest.raises(ConfigError, match=r"config.sampling.slots=3: valid are multiples of the 2 devices"):
        rollout(sampling__slots=3)


def test_as_many_slots_as_memory_holds():
    """The caches of the slots fill a share of what the model and its training leave, on every device that splits rows."""
    from cispo_jax import programs

    def chosen(memory=None, mesh=None, **changes):
        settings = debug_run.config(sampling__prompts_per_step=8, sampling__group_size=4, **changes)
        mesh = mesh or debug_run.mesh()
        run = programs.make_programs(settings, debug_run.TINY, mesh, prompt_width=65, memory=memory)
        held = programs._bytes_of_device(run.abstract_state, run.shardings)
        return run.slots, held

    long, config = 448, debug_run.TINY
    row = (
        2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * (64 + long) + 64 + long
    )  # keys, values, mask
    held = chosen()[1]
    with_room_for = lambda n: int(held + n * row / programs.MEMORY_SHARE) + 1
    assert chosen(sampling__max_new_tokens=16)[0] == 0, "short and it fits: one program"
    assert chosen(sampling__max_new_tokens=long)[0] == 32
    assert chosen(with_room_for(99), sampling__max_new_tokens=long)[0] == 32
    assert chosen(with_room_for(9), sampling__max_new_tokens=long)[0] == 9
    assert chosen(with_room_for(9) - row, sampling__max_new_tokens=long)[0] < 9
    assert chosen(0, sampling__max_new_tokens=long)[0] == 1
    assert chosen(with_room_for(9), sampling__max_new_tokens=long, sampling__slots=20)[0] == 20
    # Four devices have rows of their own, beside a copy of the model for sampling.
    copy = sum(x.size * 4 for x in jax.tree.leaves(debug_run.model()))
    assert chosen(copy + with_room_for(3), debug_run.mesh(data=4), sampling__max_new_tokens=long)[0] == 12
    assert chosen(held + 10, sampling__max_new_tokens=16)[0] == 1, "short, but it does not fit"
