"""From a command line to a checked config, or one clear message."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import pydantic_config
from pydantic import BaseModel, ValidationError

from primerl.config.complaint import fail

__all__ = ["ConfigError", "describe", "dotted", "fail", "load"]

C = TypeVar("C", bound=BaseModel)
UnknownKey = "extra_forbidden"


class ConfigError(Exception):
    """The user's input cannot be used: the message names the field or file and the mend. Exit code 2."""


def load(cls: type[C], arguments: list[str], *, program: str) -> C:
    """Reads `@ file.toml` and dotted overrides into `cls`. Exits 0 after `--help`.

    Raises [`ConfigError`][] for anything that is wrong with them.
    """
    _check_readable(arguments)
    try:
        summary = (cls.__doc__ or "").split("\n")[0]
        config: C = pydantic_config.cli(cls, args=arguments, prog=program, description=summary)
        return config
    except pydantic_config.ConfigFileError as error:
        if isinstance(error.__cause__, ValidationError):
            raise ConfigError(describe(error.__cause__, cls, arguments)) from None
        raise ConfigError(error.message) from None
    except RecursionError:
        raise ConfigError(
            f"{' and '.join([*_files(arguments), 'the command line'])}: a value is nested too deeply to be read; "
            "no key needs more than a few levels"
        ) from None
    except ValueError as error:  # a list or table on the command line that is not JSON
        raise ConfigError(f"a value on the command line is not valid JSON: {error}") from None


def _check_readable(arguments: list[str]) -> None:
    """What the config library does not turn into a message of its own."""
    for file in _files(arguments):
        try:
            Path(file).read_text(encoding="utf-8")
        except FileNotFoundError:
            pass  # the library's message is good
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; give the path of a TOML file after `@`") from None


def _files(arguments: list[str]) -> list[str]:
    return [arguments[i + 1] for i, argument in enumerate(arguments[:-1]) if argument == "@"]


def describe(error: ValidationError, cls: type[BaseModel], arguments: list[str] | None = None) -> str:
    """One line a mistake: dotted field, where it was written, what is wrong, the nearest known name."""
    lines = []
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        message = detail["msg"].removeprefix("Value error, ")
        given = detail.get("input")
        if detail["type"] == UnknownKey:
            message = "unknown key" + _suggestion(str(location[-1]), _siblings(cls, location[:-1]))
        elif detail["type"] == "missing":
            message = "missing; it has no default, so set it"
        elif not isinstance(given, dict | list | BaseModel) and given is not None:
            message = f"{message} (it is {given!r})"
        field = dotted(location)
        where = _written_in(location, arguments or [])
        lines.append(f"{field}{where}: {message}" if field else message)
    return "\n".join(lines)


def dotted(location: tuple[int | str, ...]) -> str:
    """`("train", "env", 0, "id")` -> `train.env[0].id`"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def _suggestion(unknown: str, known: list[str]) -> str:
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known keys here: {', '.join(sorted(known))}" if known else ""


def _siblings(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Keys that are known where `location` points."""
    schema = cls.model_json_schema(by_alias=False)
    node: dict[str, Any] = schema
    for part in location:
        node = _follow(node, schema)
        node = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
    return list(_follow(node, schema).get("properties", {}))


def _follow(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for choice in node.get("anyOf", []):
        if choice.get("type") != "null":
            node = choice
            break
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return node


def _written_in(location: tuple[int | str, ...], arguments: list[str]) -> str:
    """` (in file.toml)` or ` (on the command line)`, so that the user knows what to open."""
    names = [str(part) for part in location if isinstance(part, str)]
    flag = ".".join(names).replace("_", "-")
    if any(argument.split("=", 1)[0] in (f"--{flag}", f"--no-{flag}") for argument in arguments):
        return " (on the command line)"
    for file in reversed(_files(arguments)):
        if _holds(file, location):
            return f" (in {file})"
    return ""


def _holds(file: str, location: tuple[int | str, ...]) -> bool:
    import tomllib

    try:
        node: Any = tomllib.loads(Path(file).read_text())
        for part in location:
            node = node[part]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return True
