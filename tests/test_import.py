"""What an import costs and loads, each in a fresh interpreter."""

import json
import subprocess
import sys

import pytest

import cispo_jax

HEAVY = [
    "jax",
    "jaxlib",
    "numpy",
    "chex",
    "flax",
    "optax",
    "orbax",
    "ml_collections",
    "tensorflow",
    "tensorflow_datasets",
    "grain",
]


def loaded_after(code, watched=HEAVY):
    script = f"{code}\nimport json, sys; print(json.dumps([m for m in {watched!r} if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def test_import_loads_nothing_heavy():
    assert loaded_after("import cispo_jax; dir(cispo_jax); cispo_jax.__version__; hasattr(cispo_jax, '_nothing')") == []


def test_import_is_quick():
    """In CPU time, so that a busy machine does not fail it; 2 ms at best."""
    code = "import time; t = time.process_time(); import cispo_jax; print(time.process_time() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(runs) < 0.05


def test_first_use_of_a_loss_loads_jax_and_chex_only():
    loaded = loaded_after(
        "import cispo_jax; cispo_jax.cispo_loss; cispo_jax.fused_token_log_probs; cispo_jax.rloo_advantages"
    )
    assert set(loaded) == {"jax", "jaxlib", "numpy", "chex"}


def test_no_device_is_touched_by_importing_the_functional_api():
    code = "import cispo_jax\nfor name in cispo_jax.__all__: getattr(cispo_jax, name)\nfrom jax._src import xla_bridge as bridge"
    assert loaded_after(f"{code}\nassert not bridge._backends, bridge._backends") != []


@pytest.mark.parametrize("name", cispo_jax.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(cispo_jax, name)
    assert value.__doc__ and value.__module__.startswith("cispo_jax.")
    assert name in dir(cispo_jax)
    assert getattr(cispo_jax, name) is value


def test_typed_imports_are_the_lazy_ones():
    """What a type checker sees and what runs are two lists: they must not drift apart."""
    import ast
    import pathlib

    tree = ast.parse(pathlib.Path(cispo_jax.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(typed) == sorted(cispo_jax.__all__) == cispo_jax.__all__
    for name, module in typed.items():
        assert getattr(cispo_jax, name).__module__ == module


def test_submodules_resolve_and_typos_do_not():
    assert cispo_jax.objectives.cispo_loss is cispo_jax.cispo_loss
    with pytest.raises(AttributeError, match="has no attribute 'cispo_los'"):
        _ = cispo_jax.cispo_los
    from cispo_jax import cispo_loss

    assert cispo_loss is cispo_jax.cispo_loss


def test_ships_its_types():
    import pathlib

    assert (pathlib.Path(cispo_jax.__file__).parent / "py.typed").exists()
