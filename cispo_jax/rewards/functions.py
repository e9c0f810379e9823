"""Finding a user's function by `module:function` or `path/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cispo_jax.config import ConfigError, suggest
from cispo_jax.rewards.adapters import ADAPTERS

SIGNATURE = "reward(responses, *, examples, finish_reasons, response_tokens) -> list of float or None"


def resolve(spec: str, setting: str = "config.rewards") -> Callable[..., Any]:
    """Loads a reward function and checks that it can be called as one.

    Args:
      spec: `module:function` or `path/file.py:function` (relative to the current directory); with `trl:`, `trl_chat:` or `verl:` before it,
        a function for that trainer (`adapters`).
      setting: the setting that holds `spec`, for error messages.

    Raises:
      ConfigError: there is no such file, module or function, it does not import, or it takes other arguments.
    """
    kind, _, rest = spec.partition(":")
    if kind in ADAPTERS:  # written for another trainer
        return ADAPTERS[kind](load_function(rest, setting))
    function = load_function(spec, setting)
    try:
        inspect.signature(function).bind([], examples=[], finish_reasons=[], response_tokens=[])
    except TypeError as error:
        raise ConfigError(
            f"{setting}={spec} cannot be called as a reward ({error}): it is {_signature(function)}, and a reward is "
            f"{SIGNATURE}. A function that needs only some of these can take the rest as **kwargs."
        ) from None
    except ValueError:  # a builtin without a readable signature: the trial call before training will tell
        pass
    return function


def load_function(spec: str, setting: str) -> Callable[..., Any]:
    """The object behind `module:function` or `path/file.py:function`, whatever its signature, if it can be called."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{setting}={spec!r} names no function; write module:function or path/file.py:function.")
    module = _load_file(where, spec, setting) if where.endswith(".py") else _load_module(where, spec, setting)
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise ConfigError(f"{setting}={spec}: {name} is a {type(function).__name__}, not a function.")
    names = [key for key, value in vars(module).items() if key[0] != "_" and _is_own_function(value, module)]
    listing = _listing("It defines", names)
    raise ConfigError(f"{setting}={spec}: {where} has no {name}.{suggest(name, names)} {listing}")


def _load_file(where: str, spec: str, setting: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        nearby = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        listing = _listing(f"{path.parent} holds", nearby) if path.parent.is_dir() else f"{path.parent} does not exist."
        raise ConfigError(f"{setting}={spec}: there is no file {path}.{suggest(path.name, nearby)} {listing}")
    # One module a file: a second reward from the same file shares its globals, files of the same name do not collide.
    module_name = f"cispo_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # before running it: dataclasses look their own module up
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(f"{setting}={spec}: {path} cannot be imported: {describe_error(error)}.") from error
    return module


def _load_module(where: str, spec: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f" If you mean a file, write its path: {where.replace('.', '/')}.py:{spec.rpartition(':')[2]}."
        problem = f"module {where} cannot be imported: {describe_error(error)}."
        raise ConfigError(f"{setting}={spec}: {problem}{hint}") from error


def describe_error(error: BaseException) -> str:
    """`KeyError: 'answr' (rewards.py:12)`: the error and the deepest line that raised it, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):  # its text already says file and line
        return f"{type(error).__name__}: {text}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {text}{where}"


def _is_own_function(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _listing(intro: str, names: list[str]) -> str:
    return f"{intro}: {', '.join(names)}." if names else f"{intro}: nothing of the kind."


def _signature(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"
