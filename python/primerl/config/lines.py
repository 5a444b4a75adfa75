"""Where a key is written: the line of a TOML file that a message names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

Location = tuple[int | str, ...]


def of_file(path: str) -> dict[Location, int]:
    """Line, counted from 1, of every key of a TOML file, by its place in the tree; nothing of a file that is none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tomllib.loads(text)
        return of_text(text)
    except (OSError, ValueError, RecursionError):
        return {}


def of_text(text: str) -> dict[Location, int]:
    """The same of the text of a valid file.

    `tomllib` tells no lines, but it does tell whether a few lines are whole: a statement (a table's header, or a key
    with its value) ends with the first line at which it can be read.
    """
    found: dict[Location, int] = {}
    entries: dict[Location, int] = {}  # of lists of tables, so far
    table: Location = ()
    pending: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        pending.append(line)
        try:
            statement = tomllib.loads("\n".join(pending))
        except ValueError:
            continue
        first, pending = number - len(pending) + 1, []
        if not statement:
            continue
        if line.lstrip().startswith("[") and first == number:
            names = _names(statement)
            is_list = line.lstrip().startswith("[[")
            table = _place(names, entries, appends=is_list)
            place: Location = ()
            for part in table:
                place = (*place, part)
                found.setdefault(place, number)
        else:
            _note(statement, table, first, found)
    return found


def _names(header: dict[str, Any]) -> list[str]:
    names: list[str] = []
    node: Any = header
    while node:
        node = node[0] if isinstance(node, list) else node
        if not node:
            break
        ((name, node),) = node.items()
        names.append(name)
    return names


def _place(names: list[str], entries: dict[Location, int], *, appends: bool) -> Location:
    """Of a header's table: its names, with the number of the entry wherever one is a list."""
    place: Location = ()
    for index, name in enumerate(names):
        place = (*place, name)
        if appends and index == len(names) - 1:
            entries[place] = entries.get(place, -1) + 1
        if place in entries:
            place = (*place, entries[place])
    return place


def _note(value: Any, place: Location, line: int, found: dict[Location, int]) -> None:
    """A statement's keys, those within its value too."""
    items: list[tuple[int | str, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        found.setdefault((*place, key), line)
        _note(inner, (*place, key), line, found)
