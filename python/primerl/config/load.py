"""From a command line to a checked config, or one clear message."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar, cast

import pydantic_config
from pydantic import BaseModel, ValidationError

from primerl.config import asked, elsewhere, lines
from primerl.config.command_line import place_of, split
from primerl.config.complaint import fail
from primerl.config.lines import Location

__all__ = ["ConfigError", "describe", "dotted", "fail", "load"]

C = TypeVar("C", bound=BaseModel)
UnknownKey = "extra_forbidden"


class ConfigError(Exception):
    """The user's input cannot be used: the message names the field or file and the mend. Exit code 2."""


def load(cls: type[C], arguments: list[str], *, program: str) -> C:
    """Reads `@ file.toml` and dotted overrides into `cls`. Exits 0 after `--help`.

    Raises [`ConfigError`][] for anything that is wrong with them.
    """
    from primerl.config import compose

    show_help(cls, arguments, program)
    try:
        files, flags = compose.compose(cls, arguments)
        config: C = pydantic_config.cli(cls, args=flags, default=cast(C, files), prog=program)
        return config
    except pydantic_config.ConfigFileError as error:
        if isinstance(error.__cause__, ValidationError):
            raise ConfigError(describe(error.__cause__, cls, arguments)) from None
        hint = "; a config file is given as `@ FILE.toml`" if error.message.startswith("Unrecognized") else ""
        raise ConfigError(error.message + hint) from None
    except RecursionError:
        raise ConfigError(
            f"{' and '.join([*_files(arguments), 'the command line'])}: a value is nested too deeply to be read; "
            "no key needs more than a few levels"
        ) from None
    except ValueError as error:  # a list or table on the command line that is not JSON
        raise ConfigError(f"a value on the command line is not valid JSON: {error}") from None


def show_help(cls: type[BaseModel], arguments: list[str], program: str) -> None:
    """Prints help where it is asked for, and exits 0."""
    if not asked.for_help(arguments):
        return
    from primerl.config import forms
    from primerl.config import help as config_help

    form = forms.form_of(cls)
    if form is None:
        return  # the config library has help of its own
    try:
        print(config_help.text(form, arguments, program))
    except config_help.UnknownFieldError as error:
        raise ConfigError(str(error)) from None
    raise SystemExit(0)


def _files(arguments: list[str]) -> list[str]:
    return [file for file, _ in sources(arguments)]


def sources(arguments: list[str]) -> list[tuple[str, Location]]:
    """The files of a command line, each with the place in the tree that it is for: `--trainer @ trainer.toml`."""
    files, _ = split(arguments)
    return [(file, place_of(flag) if flag else ()) for file, flag in files if file is not None]


def read_sources(arguments: list[str]) -> list[tuple[dict[str, Any], Location]]:
    """What the files of a command line hold, each with its place; nothing of those that cannot be read."""
    return [(_tree(file), place) for file, place in sources(arguments)]


def describe(error: ValidationError, cls: type[BaseModel], arguments: list[str] | None = None) -> str:
    """One line a mistake: dotted field, where it was written, what is wrong, the nearest known name."""
    written = Written(arguments or [])
    # Names that other programs have, with what to write here.
    names: elsewhere.Names = getattr(cls, "elsewhere", {})
    problems = []
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        message = detail["msg"].removeprefix("Value error, ")
        given = detail.get("input")
        where = written.at(location)
        path = ".".join(part for part in location if isinstance(part, str))
        if detail["type"] == UnknownKey:
            reason = names.get(path)
            message = "unknown key" + _suggestion(str(location[-1]), _siblings(cls, location[:-1]))
            message = message if reason is None else f"no key here: {reason}"
        elif detail["type"] == "missing":
            message = "missing; it has no default, so set it"
            message += elsewhere.added(names, path, given, is_missing=True)
            where = written.near(location)
        elif detail["type"] == "list_type" and isinstance(given, dict):
            message = f"several of these may stand here, each under [[{path}]]; write it for [{path}]"
        elif not isinstance(given, dict | list | BaseModel) and given is not None and location[-1:] != ("api_key",):
            message = f"{message} (it is {given!r})" + elsewhere.added(names, path, given, is_missing=False)
        else:
            # Of a whole section: the key that its words begin with, or another whose value they tell.
            named = [re.split(r"[^\w.]", message)[0], *re.findall(r"([\w.]+) \(", message)]
            where = next(filter(None, (written.at((*location, *name.split("."))) for name in named)), where)
            message += elsewhere.added(names, path, given, is_missing=False)
        field = dotted(location)
        problems.append(f"{field}{where}: {message}" if field else f"{message}{where}")
    return "\n".join(problems)


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
        inner = node.get("properties", {}).get(part) or node.get("additionalProperties")
        node = node.get("items", {}) if isinstance(part, int) else inner if isinstance(inner, dict) else {}
    return list(_follow(node, schema).get("properties", {}))


def _follow(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for choice in node.get("anyOf", []):
        if choice.get("type") != "null":
            node = choice
            break
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return node


class Written:
    """Where the values of a command line were written, so that the user knows what to open."""

    def __init__(self, arguments: list[str]) -> None:
        named = [argument for argument in arguments if argument.startswith("--")]
        # A key's own name may begin with `no_`.
        self.flags = {place_of(flag) for flag in named} | {place_of(f"--no-{flag[2:]}") for flag in named}
        # The last one that holds a key has set it.
        self.files = [(file, place, _tree(file), lines.of_file(file)) for file, place in reversed(sources(arguments))]

    def at(self, location: Location) -> str:
        """` (in file.toml, line 3)` or ` (on the command line)`; nothing where it was not written."""
        key = tuple(part.replace("-", "_") if isinstance(part, str) else part for part in location)
        # A list that a flag gives takes the place of all entries of the files.
        if key in self.flags or any(key[:end] in self.flags for end in range(1, len(key)) if isinstance(key[end], int)):
            return " (on the command line)"
        for file, place, tree, found in self.files:
            inner = location[len(place) :]
            if location[: len(place)] != place or not inner:
                continue
            if inner in found:
                return f" (in {file}, line {found[inner]})"
            if _holds(tree, inner):
                return f" (in {file})"
        if any(key[:end] in self.flags for end in range(1, len(key))):
            return " (on the command line)"
        return ""

    def near(self, location: Location) -> str:
        """Of a key that is missing: of its table, else the file that should have it."""
        for length in range(len(location) - 1, 0, -1):
            where = self.at(location[:length])
            if where:
                return where
        roots = [file for file, place, _, _ in self.files if not place]
        return f" (in {roots[0]})" if roots else ""


def _tree(file: str) -> Any:
    """What a file holds; nothing of one that cannot be read, of which others will tell."""
    from primerl.config.compose import read

    try:
        return read(file)
    except (ConfigError, RecursionError):
        return {}


def _holds(node: Any, location: Location) -> bool:
    try:
        for part in location:
            node = node[part]
    except (LookupError, TypeError):
        return False
    return True
