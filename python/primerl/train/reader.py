"""Builds dataclasses of settings from mappings (a parsed TOML file), with errors that name the key. Standard library
only."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


class ConfigError(ValueError):
    """A setting is missing, unknown or of the wrong kind. The message names it and what to do."""


def read(kind: type[Config], values: object, where: str = "") -> Config:
    """Build the dataclass `kind` from a mapping; `where` is the dotted prefix of its keys in messages.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong kind.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where.rstrip('.') or 'config'}: expected a table, found {values!r}")
    hints = get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ConfigError(f"unknown setting `{where}{unknown[0]}`; known here: {', '.join(sorted(known)) or 'none'}")
    arguments = {}
    for name, spec in known.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], where + name)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing setting `{where}{name}`")
    return kind(**arguments)


def _convert(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return read(hint, value, name + ".")  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return _convert(inner, value, name)
    if origin is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, get_args(hint)))}")
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}; it must be a table")
        _, kind = get_args(hint)
        return {str(key): _convert(kind, item, f"{name}.{key}") for key, item in value.items()}
    if origin is list:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} is {value!r}; it must be a list")
        (kind,) = get_args(hint)
        return [_convert(kind, item, f"{name}[{index}]") for index, item in enumerate(value)]
    if hint is Any:
        return value
    if origin is tuple:
        kinds = get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise ConfigError(f"{name} is {value!r}; it must be a list of {len(kinds)} values")
        return tuple(_convert(kind, item, name) for kind, item in zip(kinds, value, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{name} is {value!r}; it must be of type {hint.__name__}")
    return value
