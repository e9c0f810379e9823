"""The order of the prompts: every epoch complete, a pure function of (seed, position)."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cispo_jax.config import ConfigError
from cispo_jax.data import PromptStream

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**63)


def examples(size):
    return [{"id": str(i)} for i in range(size)]


@given(sizes, seeds, st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_every_epoch_is_complete(size, seed, epoch):
    stream = PromptStream(examples(size), seed)
    ids = [stream[position]["id"] for position in range(epoch * size, (epoch + 1) * size)]
    assert sorted(ids, key=int) == [str(i) for i in range(size)]


@given(sizes, seeds, st.lists(st.integers(0, 500), max_size=20))
@settings(deadline=None, max_examples=50)
def test_a_position_is_a_pure_function_of_the_seed(size, seed, positions):
    """Whoever asks, in whatever order, in a new object (a resumed run, another process): the same example."""
    used = PromptStream(examples(size), seed)
    for position in positions:
        assert used[position] == PromptStream(examples(size), seed)[position]


def test_epochs_and_seeds_differ():
    stream = PromptStream(examples(50), 3)
    epochs = [[stream[k * 50 + i]["id"] for i in range(50)] for k in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other = PromptStream(examples(50), 4)
    assert [other[i]["id"] for i in range(50)] != epochs[0]


def test_a_run_saved_at_the_end_of_an_epoch_goes_on_with_the_next():
    """8 prompts, 4 a step, saved after step 2: steps 3 and 4 run on the second epoch's order."""
    uninterrupted = [PromptStream(examples(8), 0)[position]["id"] for position in range(16)]
    resumed = PromptStream(examples(8), 0)
    assert [resumed[position]["id"] for position in range(8, 16)] == uninterrupted[8:]
    assert sorted(uninterrupted[8:]) == sorted(uninterrupted[:8]) and uninterrupted[8:] != uninterrupted[:8]


def test_the_order_is_the_same_in_another_process():
    code = (
        "from cispo_jax.data import PromptStream\n"
        "s = PromptStream([{'id': i} for i in range(30)], 5)\n"
        "print([s[i]['id'] for i in range(45)])"
    )
    here = PromptStream([{"id": i} for i in range(30)], 5)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([here[i]["id"] for i in range(45)])


def test_empty_and_negative_are_refused():
    with pytest.raises(ConfigError, match="training set is empty"):
        PromptStream([], 0)
    with pytest.raises(IndexError, match="-1"):
        PromptStream(examples(3), 0)[-1]
