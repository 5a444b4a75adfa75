"""From a command line to a checked config, or one clear message."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic_config
from pydantic import BaseModel, ValidationError

from primerl.config import asked, lines, mistakes
from primerl.config.command_line import place_of, split
from primerl.config.complaint import ConfigError, fail
from primerl.config.lines import Location

__all__ = ["ConfigError", "describe", "dotted", "fail", "load"]

C = TypeVar("C", bound=BaseModel)
# A key that words begin with.
LEADING = re.compile(r"[a-z_]\w*(?:\[\d+\]|\.\w[\w-]*)*")


def load(cls: type[C], arguments: list[str], *, program: str) -> C:
    """Reads `@ file.toml` and dotted overrides into `cls`. Exits 0 after `--help`.

    Raises [`ConfigError`][] for anything that is wrong with them.
    """
    from primerl.config import compose

    show_help(cls, arguments, program)
    try:
        return cls.model_validate(compose.compose(cls, arguments))
    except ValidationError as error:
        raise ConfigError(describe(error, cls, arguments)) from None
    except RecursionError:
        raise ConfigError(
            f"{' and '.join([*_files(arguments), 'the command line'])}: a value is nested too deeply to be read; "
            "no key needs more than a few levels"
        ) from None


def show_help(cls: type[BaseModel], arguments: list[str], program: str) -> None:
    """Prints help where it is asked for, and exits 0."""
    if not asked.for_help(arguments):
        return
    from primerl.config import forms
    from primerl.config import help as config_help

    form = forms.form_of(cls)
    if form is None:
        pydantic_config.cli(cls, args=["--help"], prog=program)
        raise SystemExit(0)
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


def describe(
    error: ValidationError,
    cls: type[BaseModel],
    arguments: list[str] | None = None,
    own: Callable[[Location], Location] = lambda location: location,
) -> str:
    """One line a mistake: dotted field, where it was written, what is wrong, the nearest known name.

    Args:
        own: Where the user has written what the class has at a place.
    """
    written = Written(arguments or [])
    listed: set[Location] = set()
    problems = []
    for detail in error.errors(include_url=False):
        mistake = mistakes.told(detail, cls, listed)
        location, message = own(mistake.location), mistake.message
        where = written.near(location) if mistake.is_missing else written.at(location)
        if mistake.of_section:
            location, message, where = _of_section(mistake, written, own, where)
        field = dotted(location)
        problems.append(f"{field}{where}: {message}" if field else f"{message}{where}")
    return "\n".join(problems)


def _of_section(
    mistake: mistakes.Mistake, written: Written, own: Callable[[Location], Location], where: str
) -> tuple[Location, str, str]:
    """Place, words and where it was written: of the key that the words begin with, or of another whose value they
    tell."""
    location, message = mistake.location, mistake.message
    named = LEADING.match(message)
    if named is not None and message[named.end() :].startswith(": "):
        inner = own((*location, *_place(named[0])))
        if written.at(inner):
            return inner, message[named.end() + 2 :], written.at(inner)
    names = [named[0]] if named is not None else []
    places = (own((*location, *_place(name))) for name in [*names, *re.findall(r"([\w.]+) \(", message)])
    return own(location), message, next(filter(None, map(written.at, places)), where)


def _place(name: str) -> Location:
    """As it is written: keys that are not ours may have dashes."""
    parts = re.sub(r"\[(\d+)\]", r".\1", name).split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def dotted(location: Location) -> str:
    """`("train", "env", 0, "id")` -> `train.env[0].id`"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


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
        key = place_of(".".join(str(part) for part in location))
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
        # A key above it, or one below.
        if any(key[:end] in self.flags for end in range(1, len(key))) or any(
            flag[: len(key)] == key for flag in self.flags
        ):
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
