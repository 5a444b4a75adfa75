"""Dataclasses made of tables: the settings of a process, of a resolved file; the options of a plug-in. Standard library
only: env workers of any interpreter, and machines that only train, read their settings by it.

Bounds, defaults and help of the keys are in `primerl.config.schema`, by which a file is checked and filled when it is
written. Here a table has to have every key of its dataclass, of the kind that is declared there; the file cannot hold
None, so a key that may be None is None if it is missing.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from primerl.process.problems import ProblemError

# The integers of the orchestrator: of 32 bits and, as far as TOML holds them, of 64.
MOST_COUNT, MOST_LARGE_COUNT = 2**32 - 1, 2**63 - 1
MOST_PORTS = 65535
# An env worker that has imported verifiers and does nothing has taken half of it.
LEAST_MEMORY_MB = 1024
# Beyond any machine's cores; torch crashes where it cannot start that many.
MOST_THREADS = 1024
# A year: more overflows the clocks.
LONGEST_S = 365 * 86_400

WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}
D = TypeVar("D")


class BadSettingError(ProblemError, ValueError):
    """A key of a table is unknown, missing, or of the wrong kind."""


def from_mapping(cls: type[D], values: object, where: str = "") -> D:
    """Builds the dataclass, with those that it holds; `where`: dotted prefix of its keys in messages.

    Raises:
        BadSettingError: A key is unknown, is missing (without a default, which options of plug-ins have), or is of the
            wrong kind. The message names it.
    """
    if not isinstance(values, dict):
        key = where.rstrip(".")
        raise BadSettingError(f"{key or 'config'}: must be a table, not {values!r}", *filter(None, [key]))
    hints = get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise BadSettingError(
            f"unknown setting `{where}{unknown[0]}`; known here: {', '.join(sorted(known)) or 'none'}"
        )
    found = {}
    for name, field in known.items():
        if name in values:
            found[name] = _converted(hints[name], values[name], where + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if type(None) not in get_args(hints[name]):
                raise BadSettingError(f"missing setting `{where}{name}`")
            found[name] = None
    return cls(**found)


def _converted(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, f"{name}.")  # type: ignore[arg-type]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (option for option in inner if option is not type(None))
        return _converted(hint, value, name)
    if origin is Literal:
        if value not in inner:
            raise BadSettingError.at(name, f"must be one of {', '.join(map(repr, inner))}, not {value!r}")
        return value
    kinds: Any = (list, tuple) if origin in (list, tuple) else origin or hint
    kinds = (int, float) if hint is float else kinds
    is_one = hint is Any or (isinstance(value, kinds) and (hint is bool or not isinstance(value, bool)))
    if not is_one or (origin is tuple and len(value) != len(inner)):
        wanted = f"a list of {len(inner)} values" if origin is tuple else WORDS.get(origin or hint, "a table")
        raise BadSettingError.at(name, f"must be {wanted}, not {value!r}")
    if origin is dict:
        return {str(key): _converted(inner[1], item, f"{name}.{key}") for key, item in value.items()}
    if origin is list:
        return [_converted(inner[0], item, f"{name}[{index}]") for index, item in enumerate(value)]
    if origin is tuple:
        return tuple(_converted(kind, item, name) for kind, item in zip(inner, value, strict=True))
    return float(value) if hint is float else value
