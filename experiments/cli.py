"""What every command shares: flags and config page -> frozen `Config`, user errors as one paragraph, exit codes.

Nothing here imports jax, so `--help`, typos and the spawned reward workers (which import the main module again) stay light.
Exit codes: 0 done; 2 bad config or input; 75 stopped early, run the same command again; 1 anything else.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import sys
import textwrap
from collections.abc import Callable

from absl import flags
from ml_collections import config_flags

from cispo_jax.config import Config, ConfigError, from_config_dict

# Tables whose keys a user may invent; config_flags only knows keys that exist already.
OPEN_TABLES = ("rewards", "data.options", "data.template_kwargs")


def define_flags(*, workdir: bool = True) -> None:
    """--config and --workdir, the same for every command."""
    config_flags.DEFINE_config_file("config", None, "config page, e.g. configs/quickstart.py", lock_config=False)
    if workdir:
        flags.DEFINE_string("workdir", None, "directory of the run; made if it is not there")


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


def run(main: Callable[[Config], int | None], argv: list[str] | None = None) -> None:
    """Parses the command line, calls `main(config)` and exits with its code; a `ConfigError` becomes one paragraph and code 2."""
    if argv is None:
        _use_huge_pages()
    try:
        config = parse(sys.argv if argv is None else argv)
        code = main(config)
    except ConfigError as error:
        print(textwrap.fill(f"error: {error}", 120, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)


def _use_huge_pages() -> None:
    """Starts this command again with glibc's huge pages for large buffers, unless the user has set GLIBC_TUNABLES.

    XLA's CPU client allocates gradients and temporaries anew in every call; with 4 KiB pages a train step of a 135M model takes
    300,000 page faults and a third more time.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, sys.orig_argv)


def parse(argv: list[str]) -> Config:
    """The `Config` of `--config=PAGE --config.section.key=value ...`; every problem is a `ConfigError`."""
    if any(arg in ("--help", "-h", "-help", "--helpfull") for arg in argv[1:]):
        main = sys.modules["__main__"].__doc__ or ""
        print(main.strip(), "\n\nFlags of this command:\n" + flags.FLAGS.module_help("experiments.cli"))
        print(flags.FLAGS.main_module_help())
        sys.exit(0)
    argv, extra = _take_open_tables(argv)
    sys.argv = argv  # config_flags looks for overrides there, not in what it is handed
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise ConfigError(_first_paragraph(error)) from None
    except (AttributeError, KeyError) as error:
        raise ConfigError(_unknown_key(argv, error)) from None
    except FileNotFoundError as error:
        raise ConfigError(f"--config: no such config page: {error.filename or error}. The shipped pages are configs/*.py.") from None
    except SyntaxError as error:
        raise ConfigError(f"--config: the page {error.filename} does not parse, line {error.lineno}: {error.msg}.") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--config: {_first_paragraph(error)}") from None
    if len(rest) > 1:
        raise ConfigError(f"unexpected argument {rest[1]!r}: settings are written --config.section.key=value.")
    if flags.FLAGS.config is None:
        raise ConfigError("--config=PAGE is missing, e.g. --config=configs/quickstart.py; the shipped pages are configs/*.py.")
    if "workdir" in flags.FLAGS and not flags.FLAGS.workdir:
        raise ConfigError("--workdir=DIR is missing: the directory where the run is kept, e.g. --workdir=runs/first.")
    page = flags.FLAGS.config.copy_and_resolve_references().unlock()
    if any(re.match(r"--?config\.data\.source(=|$)", arg) for arg in argv):
        page.data.options = type(page)()  # the page's options are for the page's own source
    for name, value in extra:
        *sections, key = name.split(".")
        table = page
        for section in sections:
            table = table[section]
        table[key] = value
    return from_config_dict(page)


def _take_open_tables(argv: list[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """Splits off `--config.rewards.NAME=VALUE` and its like, `--flag value` form included; values are literals or text."""
    kept, extra, index = [], [], 0
    pattern = re.compile(rf"^--?config\.({'|'.join(map(re.escape, OPEN_TABLES))})\.([\w.]+)(?:=(.*))?$", re.DOTALL)
    while index < len(argv):
        match = pattern.match(argv[index])
        if not match:
            kept.append(argv[index])
        else:
            text = match[3]
            if text is None:
                index += 1
                if index >= len(argv):
                    raise ConfigError(f"{argv[index - 1]}: a value is missing.")
                text = argv[index]
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                value = text
            extra.append((f"{match[1]}.{match[2]}", value))
        index += 1
    return kept, extra


def _first_paragraph(error: Exception) -> str:
    return " ".join(str(error).strip().split("\n\n")[0].split()) or type(error).__name__


def _unknown_key(argv: list[str], error: Exception) -> str:
    """Names the flag whose key the page does not have, with the keys of its section."""
    from cispo_jax.config import default_config

    for arg in argv[1:]:
        match = re.match(r"^--?config\.([\w.]+)", arg)
        if not match:
            continue
        table = default_config()
        parts = match[1].split(".")
        for depth, part in enumerate(parts):
            if not hasattr(table, "keys") or part not in table:
                names = list(table.keys()) if hasattr(table, "keys") else []
                close = difflib.get_close_matches(part, names, n=1)
                mean = f' Did you mean "{close[0]}"?' if close else ""
                elsewhere = [f"config.{s}.{part}" for s in default_config() if hasattr(default_config()[s], "keys") and part in default_config()[s]]
                mean = f" It exists as {' and '.join(elsewhere)}." if elsewhere else mean
                where = "config" + "".join(f".{p}" for p in parts[:depth])
                return f"{arg.split('=')[0]}: unknown setting {part!r} in {where}.{mean} Valid there: {', '.join(names)}."
            table = table[part]
    return f"--config: {_first_paragraph(error)}"
