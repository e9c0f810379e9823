"""Checkpoints: bit-equal on any mesh, only complete ones listed, leftovers of a killed save replaced."""

import debug_run
import jax
import numpy as np
import pytest

from cispo_jax import sharding
from cispo_jax.training.checkpoint import Checkpoints
from cispo_jax.training.optimizer import make_optimizer
from cispo_jax.training.train_step import init_state

OPTIMIZER = make_optimizer(debug_run.config().optimizer)


def shardings(mesh):
    abstract = jax.eval_shape(lambda: init_state(debug_run.model(), OPTIMIZER))
    return abstract, sharding.state_shardings(abstract, mesh)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state on 2 x 2 devices whose moments are not zero, saved at steps 1 and 2."""
    directory = tmp_path_factory.mktemp("checkpoints") / "run"
    state = init_state(debug_run.model(), OPTIMIZER)
    numbers = iter(range(1000))
    values = jax.tree.map(
        lambda x: np.random.default_rng(next(numbers)).normal(size=x.shape).astype(x.dtype) + x, state
    )
    state = jax.device_put(values, shardings(debug_run.mesh(data=1, fsdp=4))[1])
    checkpoints = Checkpoints(directory, keep=2)
    assert checkpoints.latest() is None
    checkpoints.save(1, state, {"position": 4})
    checkpoints.save(2, state, {"position": 12345678901})
    checkpoints.close()
    return directory, jax.device_get(values)


@pytest.mark.parametrize("sizes", [dict(), dict(data=2), dict(fsdp=2, tensor=1, data=2), dict(fsdp=4)])
def test_a_state_comes_back_bit_equal_on_another_mesh(saved, sizes):
    """O-31: the target shardings are those of the new mesh; moments and the update count are restored too."""
    directory, values = saved
    abstract, target = shardings(debug_run.mesh(**sizes))
    checkpoints = Checkpoints(directory, keep=2)
    assert checkpoints.latest() == 2
    state, host = checkpoints.restore(2, abstract, target)
    checkpoints.close()
    assert host == {"position": 12345678901}
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), values)
    assert all(x.sharding == s for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True))


def test_only_the_newest_are_kept_and_a_step_is_saved_once(tmp_path):
    state = jax.device_put(init_state(debug_run.model(), OPTIMIZER), jax.devices()[0])
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        checkpoints.save(step, state, {"position": step})
        checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]
    checkpoints.close()


def test_an_unfinished_save_is_not_chosen_and_its_step_is_written_again(tmp_path, saved):
    """O-30: the folder that a kill left behind."""
    import shutil

    directory, values = saved
    shutil.copytree(directory, tmp_path / "run")
    shutil.copytree(tmp_path / "run/2", tmp_path / "run/3.orbax-checkpoint-tmp")
    checkpoints = Checkpoints(tmp_path / "run", keep=5)
    assert checkpoints.latest() == 2
    state = jax.device_put(values, jax.devices()[0])
    checkpoints.save(3, state, {"position": 3})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "run", keep=5)
    assert checkpoints.latest() == 3
    checkpoints.close()
    assert not list((tmp_path / "run").glob("*tmp*"))


def test_a_failed_background_save_ends_the_run(tmp_path, saved):
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    state = jax.device_put(saved[1], jax.devices()[0])

    class Unwritable:
        pass

    with pytest.raises(Exception):  # noqa: B017 - whatever Orbax raises must not be swallowed
        checkpoints.save(1, state, {"position": Unwritable()})
        checkpoints.wait()
    assert checkpoints.latest() is None


def test_another_architecture_is_refused_with_a_clear_error(saved):
    import dataclasses

    other = debug_run.model(dataclasses.replace(debug_run.TINY, mlp_dim=40))
    abstract = jax.eval_shape(lambda: init_state(other, OPTIMIZER))
    target = sharding.state_shardings(abstract, debug_run.mesh())
    checkpoints = Checkpoints(saved[0], keep=2)
    with pytest.raises(ValueError, match="shape"):
        checkpoints.restore(2, abstract, target)
    checkpoints.close()
