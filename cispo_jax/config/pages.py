"""From a config page, a flag's text or a config.json to the frozen `Config`, and back."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from cispo_jax.config.checks import validate
from cispo_jax.config.settings import Config, ConfigError, RewardSettings, suggest

Section = typing.TypeVar("Section")


def default_config() -> Any:
    """An unlocked `ConfigDict` with every setting at its default, for a config page to change."""
    from ml_collections import config_dict

    def convert(cls: type) -> Any:
        section = config_dict.ConfigDict()
        hints = typing.get_type_hints(cls)
        for name, spec in ((f.name, f) for f in dataclasses.fields(cls)):
            if cls is RewardSettings and name == "functions":
                continue  # free names: each one is a key of its own
            if dataclasses.is_dataclass(hints[name]):
                section[name] = convert(hints[name])
            elif spec.default is None:
                section[name] = config_dict.placeholder(_optional(hints[name]))
            elif spec.default is dataclasses.MISSING:
                section[name] = config_dict.ConfigDict()
            else:
                section[name] = spec.default
        return section

    return convert(Config)


def from_config_dict(config: Mapping[str, Any] | Config) -> Config:
    """The frozen `Config` of a page's `ConfigDict`; refuses unknown keys, wrong types and values that cannot work together."""
    if isinstance(config, Config):
        settings = config
    else:
        plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        settings = _build(Config, plain, "")
    validate(settings)
    return settings


def changed(settings: Section, values: Mapping[str, Any], path: str) -> Section:
    """A section with some other values, of the types that a page's must have; `path` (without `config.`) names them in errors."""
    hints = typing.get_type_hints(type(settings))
    new = {name: _convert(hints[name], value, f"{path}.{name}") for name, value in values.items()}
    return typing.cast(Section, dataclasses.replace(typing.cast(Any, settings), **new))


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, for `config.json`; `from_config_dict` reads them back."""
    values = dataclasses.asdict(config)
    values["rewards"] |= values["rewards"].pop("functions")
    return values


def set_from_text(page: dict[str, Any], name: str, text: str) -> None:
    """Sets `name` ("section.key") in a page's nested dicts from the text of a flag, read as the setting's type."""
    *sections, key = name.split(".")
    hint: Any = Config
    path = ""
    for section in sections:
        if typing.get_origin(hint) is Mapping:  # a table in a table of free keys
            inner = page.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"config.{path}{section} is a value, not a table: config.{name} does not exist.")
            page, path = inner, f"{path}{section}."
            continue
        if not dataclasses.is_dataclass(hint):
            raise ConfigError(f"config.{path[:-1]} is a value, not a section: config.{name} does not exist.")
        hints = typing.get_type_hints(hint)
        if section not in hints:
            raise ConfigError(_unknown(section, path, list(hints)))
        hint, page, path = hints[section], page.setdefault(section, {}), f"{path}{section}."
    if typing.get_origin(hint) is Mapping:  # a table of free keys
        page[key] = _literal(text)
        return
    if not dataclasses.is_dataclass(hint):
        raise ConfigError(f"config.{path[:-1]} is a value, not a section: config.{name} does not exist.")
    hints = typing.get_type_hints(hint)
    if hint is RewardSettings and (key not in hints or key == "functions"):
        page[key] = text
    elif key not in hints:
        raise ConfigError(_unknown(key, path, list(hints)))
    else:
        kind = _optional(hints[key])
        value: Any = text if kind is str and not (kind is not hints[key] and text in ("None", "")) else _literal(text)
        if kind is bool and text.lower() in ("true", "false"):
            value = text.lower() == "true"
        if kind is float and text.strip("+-").lower() in ("inf", "nan"):
            value = float(text)  # to be refused as a number that is not finite
        page[key] = _convert(hints[key], value, name)


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _optional(hint: Any) -> type:
    """The type inside `T | None`, or the type itself."""
    inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return inner[0] if type(None) in typing.get_args(hint) else hint


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
    """A settings dataclass from nested plain values."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    if cls is RewardSettings:
        names.remove("functions")
        free = {key: value for key, value in values.items() if key not in names}
        for key, value in free.items():
            if not isinstance(value, str) or ":" not in value:
                raise ConfigError(
                    f"config.rewards.{key}={value!r}: a reward of your own is written module_or_file:function, e.g. "
                    f"my_reward.py:reward; the settings are {', '.join(names)}.{suggest(key, names)}"
                )
        known = {key: _convert(hints[key], values[key], f"{path}{key}") for key in names if key in values}
        return cls(functions=free, **known)
    for key in values:
        if key not in names:
            raise ConfigError(_unknown(key, path, names))
    return cls(**{key: _convert(hints[key], value, f"{path}{key}") for key, value in values.items()})


def _unknown(key: str, path: str, names: list[str]) -> str:
    """One sentence for an unknown key, with its section's keys, the nearest one, and the sections where that name does exist."""
    sections = {f.name: typing.get_type_hints(Config)[f.name] for f in dataclasses.fields(Config)}
    elsewhere = [
        f"config.{section}.{key}"
        for section, cls in sections.items()
        if dataclasses.is_dataclass(cls) and key in {f.name for f in dataclasses.fields(cls)}
    ]
    where = f"section config.{path[:-1]}" if path else "the top level of the config"
    hint = f" It exists as {' and '.join(elsewhere)}." if elsewhere else suggest(key, names)
    return f"config.{path}{key}: unknown setting in {where}.{hint} Valid there: {', '.join(names)}."


def _plain(value: Any) -> Any:
    """Tables as dicts and sequences as lists, so that a page, a frozen page and config.json give equal settings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    _check_size(value)
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _check_size(value: Any, path: str = "") -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"config.{path or 'data.options'}={value}: integers must be smaller than 2**63.")


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.{path}={value!r}: this is a section of settings, not a value.")
        return _build(typing.cast(type, hint), value, f"{path}.")
    if typing.get_origin(hint) is not None and typing.get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.{path}={value!r}: must be a table, e.g. config.{path}.NAME=VALUE.")
        return _plain(value)
    kind = _optional(hint)
    if value is None and kind is not hint:
        return None
    _check_size(value, path)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"config.{path}={value!r}: must be of type {kind.__name__}, not {type(value).__name__}.")
    return value
