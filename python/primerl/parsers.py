"""Parsers of tool calls and reasoning that others describe, in packages and files.

A description is data (`docs/render.md`, *A parser of your own*); no Python runs on an answer. Standard library only,
and `primerl._core` where a description is checked.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "primerl.tool_parsers"
"""Entry points of this group are descriptions: `module:NAME` is a table, or the path of a file with one."""
FILES = (".toml", ".json")


class ParserError(ValueError):
    """There is no such parser, or its description cannot be used. The message names the field and what is wrong."""


def registered() -> dict[str, EntryPoint]:
    """What installed packages register, by name."""
    from importlib import metadata

    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def describe(name: str) -> dict[str, Any]:
    """The checked description that a package registers under this name, or that the file of this path holds."""
    if name.endswith(FILES):
        return checked(_of_file(Path(name)), name, Path(name).stem)
    points = registered()
    if name not in points:
        near = difflib.get_close_matches(name, points, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"packages register {', '.join(sorted(points)) or 'none'}"
        raise ParserError(f"no package registers a parser {name!r} (entry points of {GROUP}); {hint}")
    place = f"{points[name].value} (the entry point {name!r} of {GROUP})"
    try:
        found = points[name].load()
    except (Exception, SystemExit) as error:
        raise ParserError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    if isinstance(found, str | os.PathLike):
        # As what else belongs to a module: a path is relative to its folder.
        source = import_module(points[name].module).__file__
        found = _of_file(Path(source or "").parent / found)
    if not isinstance(found, dict):
        raise ParserError(f"{place} is {found!r}; give a table, or the path of a .toml or .json file")
    return checked(found, place, name)


def checked(description: dict[str, Any], place: str, name: str) -> dict[str, Any]:
    """The description with a name. Raises ParserError that says where it is from."""
    from primerl._core import RenderError, check_parser

    named = {"name": name, **description}
    try:
        check_parser(named)
    except RenderError as error:
        raise ParserError(f"{place}: {error}") from error
    return named


def _of_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except RecursionError:
        raise ParserError(f"{path} cannot be read: a value is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ParserError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ParserError(f"{path} holds no table")
    return found
