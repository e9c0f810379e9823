"""The layers of the library, read from its imports: a file imports only from its own layer or a lower one.

Where a new file makes a test here fail, give it a place in LAYERS; where an import does, move the code, not the table.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import cispo_jax
from cispo_jax import _requires_train

ROOT = Path(cispo_jax.__file__).parent
LAYERS = (
    ("masked", "objectives", "advantages", "log_probs", "diagnostics", "routing", "_requires_train"),
    ("config", "types", "sharding", "distributed", "storage"),
    ("models",),
    ("weights", "sampling", "training", "data", "rewards"),
    ("trainer", "evaluation", "estimates", "building", "programs", "reporting"),
)
CORE = (*LAYERS[0], "types", "sampling.decode", "training.groups", "training.train_step", "trainer")
# The core is handed functions (`forward`, `sample_fn`, `reward`).
NOT_IN_CORE = ("models", "weights", "data", "rewards", "building", "programs")
JAX = ("jax", "jaxlib", "chex", "flax", "optax", "orbax")

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
# `__init__` files only re-export; the package's own name stands for them.
MODULES = {name: path for name, path in FILES.items() if path.name != "__init__.py"}


def imports(path: Path, *, inside_functions: bool = True) -> set[str]:
    """What a file imports: `cispo_jax.x.y` as ".x.y", anything else by its top-level name."""
    found = set()
    for node in statements(ast.parse(path.read_text()), inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top != "cispo_jax":
                found.add(top)
            else:
                while rest and rest not in FILES:  # a function or class, not a module
                    rest = rest.rpartition(".")[0]
                found.add(f".{rest}")
    return found


def statements(tree: ast.AST, *, inside_functions: bool):
    for node in ast.iter_child_nodes(tree):
        if not inside_functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not inside_functions and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from statements(node, inside_functions=inside_functions)


def layer(module: str) -> int:
    places = [i for i, names in enumerate(LAYERS) if module.partition(".")[0] in names]
    assert len(places) == 1, f"cispo_jax/{module.replace('.', '/')}: not in LAYERS of {__file__}"
    return places[0]


def own(names: set[str]) -> set[str]:
    return {name[1:] for name in names if name.startswith(".") and name != "."}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_imports_only_from_its_own_layer_or_lower(module):
    too_high = [name for name in own(imports(MODULES[module])) if layer(name) > layer(module)]
    assert not too_high, f"cispo_jax.{module} is layer {layer(module)} and imports {too_high}"
    assert "." not in imports(MODULES[module]), f"cispo_jax.{module} imports the whole library: name the module"


def test_no_cycles():
    graph = {name: own(imports(path)) & set(FILES) for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("module", LAYERS[0])
def test_the_maths_sees_arrays_only(module):
    allowed = {"jax", "chex", "numpy", *sys.stdlib_module_names}
    outside = {name for name in imports(MODULES[module]) if not name.startswith(".")} - allowed
    assert not outside, f"cispo_jax.{module} is layer 0 and imports {outside}"


@pytest.mark.parametrize("module", CORE)
def test_the_core_is_handed_functions(module):
    names = own(imports(MODULES[module], inside_functions=False))
    taken = [name for name in names if name.partition(".")[0] in NOT_IN_CORE]
    assert not taken, f"cispo_jax.{module} is core and imports {taken}: hand it a function instead"


@pytest.mark.parametrize("module", [name for name in FILES if name.partition(".")[0] in ("data", "rewards")])
def test_data_and_rewards_never_load_jax(module):
    """Also not through another file, nor inside a function: reward workers start in a fraction of a second."""
    assert not imports(FILES[module]) & set(JAX)
    seen, todo = set(), {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        names = imports(FILES[name], inside_functions=False)
        assert not names & set(JAX), f"cispo_jax.{module} imports cispo_jax.{name}, which imports {names & set(JAX)}"
        todo |= {part for full in own(names) for part in (full, full.rpartition(".")[0]) if part} - seen


def test_make_size_counts_this_core():
    makefile = (ROOT.parent / "Makefile").read_text().replace("\\\n", " ")
    counted = re.search(r"^CORE := \$\(addprefix cispo_jax/,(.*)\)$", makefile, re.MULTILINE)[1].split()
    assert {name.removesuffix(".py").replace("/", ".") for name in counted} == set(CORE) - {"_requires_train"}


def test_the_table_names_what_is_there():
    assert {name for names in LAYERS for name in names} == {name.partition(".")[0] for name in FILES if name}


# ---- what is installed decides what can be imported


def run(code: str, *, without: tuple[str, ...]) -> subprocess.CompletedProcess:
    """Runs `code` in an interpreter that cannot find the packages `without`."""
    blocker = f"""
        import sys
        from importlib.machinery import PathFinder

        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name.partition(".")[0] not in {without!r}:
                    return PathFinder.find_spec(name, path, target)

        sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
    """
    command = [sys.executable, "-c", textwrap.dedent(blocker) + textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True)


@pytest.mark.parametrize("missing", [("flax",), ("gguf", "tokenizers"), _requires_train.PACKAGES], ids=len)
def test_an_import_without_its_extra_says_how_to_install_it(missing):
    modules = ("data", "evaluation", "models", "sampling", "sharding", "trainer", "training", "weights")
    statements = [f"import cispo_jax.{name}" for name in modules]
    statements += ["from cispo_jax import trainer", "from cispo_jax.models import forward", "import experiments.cli"]
    code = f"""
        import cispo_jax
        for statement in {statements!r}:
            try:
                exec(statement)
            except ImportError as error:
                print(error)
    """
    done = run(code, without=missing)
    messages = done.stdout.splitlines()
    assert len(messages) == len(statements), done.stderr
    for message in messages:
        assert ", ".join(missing) in message
        assert message.endswith("pip install 'cispo-jax[train]'")


def test_the_losses_need_jax_and_chex_only():
    code = """
        import cispo_jax
        assert not {"jax", "chex", "numpy"} & set(sys.modules)
        import cispo_jax.rewards, cispo_jax.config
        assert "jax" not in sys.modules
        loss, _ = cispo_jax.cispo_loss([[-1.0]], [[-1.0]], [1.0], [[True]])
        assert loss == 1.0
    """
    others = {*_requires_train.PACKAGES, "reasoning_gym"} - {"absl"}  # chex itself imports absl
    done = run(code, without=tuple(others))
    assert done.returncode == 0, done.stderr


def test_the_extra_and_the_check_name_the_same_packages():
    extras = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    canonical = lambda name: re.split(r"[\[<>= ]", name)[0].replace("_", "-").lower()
    declared = {canonical(requirement) for requirement in extras["train"]} - {"jax"}
    installed = importlib.metadata.packages_distributions()
    assert declared == {canonical(installed[name][0]) for name in _requires_train.PACKAGES}
