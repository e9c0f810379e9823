"""What every test runs under. Needs jax and hypothesis only, so that the tests of the losses run on a base install."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Through the environment, so that commands which a test starts inherit it; a variable that is set already wins.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cispo_jax" / "tests"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_RANK_PROMOTION": "raise",  # broadcasting over a missing axis is a mistake until it is written out
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # tests compile more than they compute: this halves the compilation
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # experiments.cli would start each command twice to set it
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

import jax  # noqa: E402  (reads the environment)

# Not in the environment: commands that a test starts see one device, as a user's do.
with contextlib.suppress(AttributeError):  # before jax 0.5, on which only the losses are tested
    jax.config.update("jax_num_cpu_devices", 8)

settings.register_profile("repeatable", derandomize=True, deadline=None)  # compiling takes longer than any deadline
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _generated_data_sets(tmp_path_factory):
    """Data sets that a config page generates go to a place of this session, not to the user's."""
    os.environ["TFDS_DATA_DIR"] = str(tmp_path_factory.mktemp("tfds"))
