"""What each process does in the tests of several processes: `python process_parts.py NAME FOLDER [--coordinator=... ...]`."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from cispo_jax import distributed
from cispo_jax.types import Rollout


def travel(folder: Path) -> None:
    """Everything that goes between host and devices, and between processes."""
    import jax

    from cispo_jax import sharding

    distributed.PIECE = 1000  # several pieces of small arrays
    me, N = jax.process_index(), jax.process_count()
    assert (me == 0) == distributed.is_main() and distributed.num_processes() == N
    # Disjoint, together complete.
    for count in (0, 1, 7):
        shares = distributed.gather(list(range(count))[distributed.share(count)])
        assert [i for share in shares for i in share] == list(range(count)) and max(map(len, shares)) - min(
            map(len, shares)
        ) <= 1
        done: list[int] = []
        assert distributed.divide(lambda mine: [done.append(i) or f"√{i}" for i in range(count)[mine]], count) == [
            f"√{i}" for i in range(count)
        ]
        assert len(done) == len(shares[me])
    text = "x" * (5000 * (me + 1))
    assert distributed.gather(text) == ["x" * 5000, "x" * 10000][:N]
    # Split in every way, values and types stay.
    mesh = sharding.make_mesh(sharding.MeshSettings(data=2, fsdp=-1))
    both = ("data", "fsdp")
    splits = ((both, None), (None, "fsdp"), ("fsdp", None), (None, None), both, (None, both))
    for axes, dtype in zip(splits, (np.float32, np.int32, bool) * 2, strict=True):
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        x = (np.arange(16 * 56).reshape(16, 56) % 5).astype(dtype)
        array = distributed.from_host(x, placed)
        assert array.sharding == placed and np.array_equal(distributed.to_host(array), x)
        assert distributed.to_host(array).dtype == dtype
    with distributed.main_first("a file"):
        if distributed.is_main():
            (folder / "made").write_text("here")
        assert (folder / "made").read_text() == "here"


def sample(model, prompts, *, group_size, step, prompt_ids, max_new_tokens, prompt_width, temperature, **_) -> Rollout:
    """Recorded rollouts: a function of step and prompt alone, whatever the model has learned."""
    rows = []
    for prompt, prompt_id in zip(prompts, prompt_ids, strict=True):
        generator = np.random.default_rng((step, prompt_id, int(temperature > 0)))
        for _ in range(group_size):
            length = int(generator.integers(1, max_new_tokens + 1))
            tokens, mask = np.zeros((2, prompt_width), np.int32)
            tokens[prompt_width - len(prompt) :], mask[prompt_width - len(prompt) :] = prompt, 1
            response, log_probs = np.zeros(max_new_tokens, np.int32), np.zeros(max_new_tokens, np.float32)
            response[:length] = generator.integers(0, 14, length)
            log_probs[:length] = -generator.uniform(1, 4, length)
            counted = np.arange(max_new_tokens) < length
            rows.append(
                (tokens, mask.astype(bool), response, counted, counted, log_probs, np.int8(length == max_new_tokens))
            )
    return Rollout(*map(np.stack, zip(*rows, strict=True)))


scored: list[str] = []


def digits(responses, **_):
    """Every group has a signal, so that every step moves the weights."""
    scored.extend(responses)
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in responses]


def train(folder: Path) -> None:
    """A run on forced rollouts; what this process scored goes to scored_ID.json."""
    import debug_run
    import jax

    from cispo_jax import trainer

    settings = dict(num_steps=2, mesh__fsdp=-1, sampling__group_size=8, data__eval_size=4, evaluation__every=1)
    if (folder / "settings.json").exists():
        settings |= json.loads((folder / "settings.json").read_text())
    del scored[:]
    trainer.train(
        debug_run.config(**settings),
        folder / "run",
        dataset=debug_run.SUMS,
        reward=digits,
        model=debug_run.model(),
        sample_fn=sample,
    )
    (folder / f"scored_{jax.process_index()}.json").write_text(json.dumps(scored))


def even():
    """An architecture whose vocabulary splits over two devices."""
    import dataclasses

    import debug_run

    return dataclasses.replace(debug_run.TINY, vocab_size=18)


def state_on(mesh):
    """A state whose leaves are all different, made from the host's values."""
    import debug_run
    import jax

    from cispo_jax import sharding
    from cispo_jax.training.optimizer import make_optimizer
    from cispo_jax.training.train_step import init_state

    optimizer = make_optimizer(debug_run.config().optimizer)
    abstract = jax.eval_shape(lambda: init_state(debug_run.model(even()), optimizer))
    shardings = sharding.state_shardings(abstract, mesh)
    numbers = iter(range(1000))
    values = jax.tree.map(lambda x: np.random.default_rng(next(numbers)).normal(size=x.shape).astype(x.dtype), abstract)
    return abstract, shardings, values


def write(folder: Path) -> None:
    """A checkpoint and a Hugging Face folder, from 2 x 2 devices."""
    import jax

    from cispo_jax import sharding, weights
    from cispo_jax.training.checkpoint import Checkpoints

    mesh = sharding.make_mesh(sharding.MeshSettings(data=1, fsdp=4))
    _, shardings, values = state_on(mesh)
    state = jax.tree.map(distributed.from_host, values, shardings)
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    checkpoints.save(1, state, {"position": 4})
    checkpoints.close()
    weights.save_pretrained(folder / "model", state.model, even(), max_shard_bytes=3000)
    assert len(list((folder / "model").glob("*.safetensors"))) > 2


def read(folder: Path) -> None:
    """Both on meshes of another shape: every bit as it was written."""
    import jax

    from cispo_jax import sharding, weights
    from cispo_jax.training.checkpoint import Checkpoints

    for sizes in (dict(data=2, fsdp=2), dict(data=1, fsdp=2, tensor=2), dict(data=4, fsdp=1)):
        mesh = sharding.make_mesh(sharding.MeshSettings(**sizes))
        abstract, shardings, values = state_on(mesh)
        checkpoints = Checkpoints(folder / "checkpoints", keep=2)
        state, host = checkpoints.restore(1, abstract, shardings)
        checkpoints.close()
        assert host == {"position": 4}
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(distributed.to_host(x), y), state, values)
        model, _ = weights.load_pretrained(folder / "model", mesh=mesh)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(distributed.to_host(x), y), model, values.model)


def wait(folder: Path) -> None:
    """Waits for a process that never comes."""
    (folder / f"ready_{distributed.global_state.process_id}").write_text("")
    distributed.barrier("never" if distributed.is_main() else "nowhere")


def fail(folder: Path) -> None:
    """An error in the last process alone, while the others are in a collective."""
    distributed.barrier("start")
    if not distributed.is_main():
        raise ValueError("only here")
    distributed.gather(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    given = parser.parse_args()
    distributed.initialize(given.coordinator, given.num_processes, given.process_id)
    sys.stdout.reconfigure(line_buffering=True)
    globals()[given.name](given.folder)
