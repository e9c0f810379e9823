"""What every command shares: flags and config page -> frozen `Config`, user errors as one paragraph, exit codes.

Nothing here imports jax, so `--help`, typos and the spawned reward workers (which import the main module again) stay light.
Exit codes: 0 done; 2 bad config or input; 75 stopped early, run the same command again; 1 anything else.
"""

from __future__ import annotations

from cispo_jax import _requires_train  # noqa: F401

# isort: split
import ctypes
import glob
import os
import re
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from cispo_jax.config import Config, ConfigError, from_config_dict, set_from_text, suggest


def define_flags(*, workdir: bool = True) -> None:
    """--config, --workdir and who this process is, the same for every command."""
    flags.DEFINE_string(
        "config", None, "config page, e.g. configs/quickstart.py; --config.section.key=value changes a setting"
    )
    if workdir:
        flags.DEFINE_string("workdir", None, "directory of the run; made if it is not there")
    flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0, where no cluster says how many processes there are"
    )
    flags.DEFINE_integer("num_processes", None, "processes of this run; each is started with the same command")
    flags.DEFINE_integer("process_id", None, "which of them this one is: 0 to num_processes - 1")


def quiet() -> None:
    """Keeps the information messages of libraries (checkpointing writes dozens) off the terminal; sets the compile cache."""
    import jax
    from absl import logging

    logging.set_verbosity(logging.WARNING)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cispo_jax", "compiled"
    )
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    trim_after_compiling()


def start() -> None:
    """What a command that works on devices does first: `quiet`, and joining the other processes of the run."""
    quiet()
    from cispo_jax import distributed

    names = flags.FLAGS
    distributed.initialize(names.coordinator, names.num_processes, names.process_id)


def run(
    main: Callable[[Config], int | None],
    argv: list[str] | None = None,
    instead: Mapping[str, Callable[[str], int | None]] | None = None,
) -> None:
    """Parses the command line, calls `main(config)` and exits with its code; a `ConfigError` becomes one paragraph and code 2.

    `instead`: flags that are a command of their own, without a page: where one is given, its function gets its value.
    """
    if argv is None:
        use_huge_pages()
    argv = sys.argv if argv is None else argv
    try:
        names = {f"--{name}": function for name, function in (instead or {}).items()}
        other = [
            (names[arg.partition("=")[0]], arg.partition("=")[2]) for arg in argv[1:] if arg.partition("=")[0] in names
        ]
        code = other[0][0](other[0][1]) if other else main(parse(argv))
    except ConfigError as error:
        _fail(textwrap.fill(f"error: {error}", 120, break_long_words=False, break_on_hyphens=False))
    sys.exit(code or 0)


def _fail(paragraph: str) -> None:
    distributed = sys.modules.get("cispo_jax.distributed")  # not loaded: nothing has been started
    if distributed is not None:
        distributed.fail(paragraph, 2)
    print(paragraph, file=sys.stderr)
    sys.exit(2)


def use_huge_pages() -> None:
    """Starts this command again with glibc's huge pages for large buffers, unless the user has set GLIBC_TUNABLES.

    XLA's CPU client allocates gradients and temporaries anew in every call; with 4 KiB pages a train step of a 135M model takes
    300,000 page faults and a third more time.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, sys.orig_argv)


def trim_after_compiling() -> None:
    """Hands the memory that a compilation has freed back to the system, where glibc would keep it.

    A model of 8 layers x 256 on a CPU: a peak of 940 MiB in place of 1,175 (`experiments/benchmarks/rl_step.py --layers=8 --vocab=8192`).
    """
    import jax

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        compiled = "/jax/core/compile/backend_compile_duration"
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: trim(0) if event == compiled else None
        )


def parse(argv: list[str]) -> Config:
    """The `Config` of `--config=PAGE --config.section.key=value ...`; every problem is a `ConfigError`.

    The settings are applied here, not by `ml_collections.config_flags`: its errors are tracebacks, it knows only the keys that the page
    has (a reward of one's own is a new one), and optional values cannot be set back to None.
    """
    if any(arg in ("--help", "-h", "-help", "--helpfull") for arg in argv[1:]):
        main = sys.modules["__main__"].__doc__ or ""
        print(main.strip(), "\n\nFlags of this command:\n" + flags.FLAGS.module_help("experiments.cli"))
        print(flags.FLAGS.main_module_help())
        sys.exit(0)
    argv, settings = take_settings(argv)
    try:
        rest = flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if len(rest) > 1:
        raise ConfigError(f"unexpected argument {rest[1]!r}: settings are written --config.section.key=value.")
    if not flags.FLAGS.config:
        raise ConfigError(
            "--config=PAGE is missing, e.g. --config=configs/quickstart.py; the shipped pages are configs/*.py."
        )
    if "workdir" in flags.FLAGS:
        workdir = flags.FLAGS.workdir
        if not workdir and flags.FLAGS["workdir"].default is None:
            raise ConfigError(
                "--workdir=DIR is missing: the directory where the run is kept, e.g. --workdir=runs/first."
            )
        if workdir and os.path.isfile(workdir):
            raise ConfigError(f"--workdir={workdir} is a file; give a directory, which is made if it is not there.")
    page = load_page(flags.FLAGS.config)
    source = [text for name, text in settings if name == "data.source"]
    if source and source[-1] != page["data"]["source"]:
        page["data"]["options"] = {}  # the page's options are for the page's own source
    for name, text in settings:
        set_from_text(page, name, text)
    return from_config_dict(page)


def load_page(spec: str) -> dict[str, Any]:
    """The settings of a page as nested dicts; `path.py:variant` calls its `get_config("variant")`."""
    path, _, variant = spec.partition(".py:")
    path = f"{path}.py" if variant else path
    if not os.path.isfile(path):
        pages = sorted(glob.glob(os.path.join(os.path.dirname(path) or ".", "*.py"))) or sorted(
            glob.glob("configs/*.py")
        )
        pages = [page for page in pages if not page.endswith("__init__.py")]
        raise ConfigError(
            f"--config={spec}: no such config page.{suggest(path, pages)} There are {', '.join(pages) or 'none'}."
        )
    try:
        make = runpy.run_path(path, run_name="config_page").get("get_config")
        if make is None:
            raise ConfigError(f"--config={spec}: the page has no function get_config().")
        config = make(variant) if variant else make()
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"--config={spec}: the page does not parse, line {error.lineno}: {error.msg}.") from None
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f", line {frames[-1].lineno}" if frames else ""
        raise ConfigError(f"--config={spec}: the page failed{where}: {type(error).__name__}: {error}") from None
    if not hasattr(config, "to_dict"):
        raise ConfigError(f"--config={spec}: get_config() must return a ConfigDict, not {type(config).__name__}.")
    return config.to_dict()


def take_settings(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Splits off `--config.section.key=value` and `--config.section.key value` as (section.key, text)."""
    kept, settings = [], []
    remaining = iter(argv)
    for arg in remaining:
        match = re.match(r"^--?config\.([^=]+)(?:=(.*))?$", arg, re.DOTALL)
        if not match:
            kept.append(arg)
            continue
        text = match[2] if match[2] is not None else next(remaining, None)
        if text is None:
            raise ConfigError(f"{arg}: a value is missing.")
        settings.append((match[1], text))
    return kept, settings
