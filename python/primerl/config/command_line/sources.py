"""The files of a command line: what they hold, and where each key is written, which messages name."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from primerl.config.command_line.arguments import Location, place_of, split
from primerl.config.errors.fail import ConfigError


def read(file: str) -> dict[str, Any]:
    """A file's tables. TOML, unless its name ends in .json, .yaml or .yml.

    Raises:
        ConfigError: It is not there, cannot be read or holds no tables.
    """
    kind = Path(file).suffix.lower()
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"Config file not found: {file}; give the path of a TOML file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give the path of a TOML file") from None
    try:
        if kind in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped]

            tree = yaml.safe_load(text) or {}
        else:
            tree = json.loads(text) if kind == ".json" else tomllib.loads(text)
    except ImportError:
        raise ConfigError(f"{file} is YAML, and pyyaml is not installed; give the path of a TOML file") from None
    except Exception as error:
        if isinstance(error, RecursionError):
            raise
        name = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}.get(kind, "TOML")
        raise ConfigError(f"Invalid {name} in {file}: {_words_of(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds no tables of keys; see docs/configuration.md")
    return tree


def _words_of(error: Exception) -> str:
    """Without the line itself, which PyYAML shows and which may hold a key."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    # Names of anchors and tags are the user's; what stands between < and > is the grammar's, and a character is no key.
    problem = re.sub(r"'[^'<][^']+'|\"[^\"]*\"", "something else", problem)
    return f"{problem} (at line {mark.line + 1}, column {mark.column + 1})"


def sources(arguments: list[str]) -> list[tuple[str, Location]]:
    """The files of a command line, each with the place in the tree that it is for: `--trainer @ trainer.toml`."""
    files, _ = split(arguments)
    return [(file, place_of(flag) if flag else ()) for file, flag in files if file is not None]


def read_sources(arguments: list[str]) -> list[tuple[dict[str, Any], Location]]:
    """What the files of a command line hold, each with its place; nothing of those that cannot be read."""
    return [(_tree(file), place) for file, place in sources(arguments)]


class Written:
    """Where the values of a command line were written, so that the user knows what to open."""

    def __init__(self, arguments: list[str]) -> None:
        named = [argument for argument in arguments if argument.startswith("--")]
        # A key's own name may begin with `no_`.
        self.flags = {place_of(flag) for flag in named} | {place_of(f"--no-{flag[2:]}") for flag in named}
        # The last one that holds a key has set it.
        self.files = [(file, place, _tree(file), of_file(file)) for file, place in reversed(sources(arguments))]

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
        """Where a missing key should be: its table, else the file."""
        for length in range(len(location) - 1, 0, -1):
            where = self.at(location[:length])
            if where:
                return where
        roots = [file for file, place, _, _ in self.files if not place]
        return f" (in {roots[0]})" if roots else ""


def _tree(file: str) -> Any:
    """What a file holds; nothing of one that cannot be read, of which others will tell."""
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


def of_file(path: str) -> dict[Location, int]:
    """Line, counted from 1, of every key of a TOML file, by its place in the tree; empty if the file is not TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tomllib.loads(text)
        return of_text(text)
    except (OSError, ValueError, RecursionError):
        return {}


def of_text(text: str) -> dict[Location, int]:
    """As `of_file`, for the text of a valid file.

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
    """Place of a header's table: its names, with the number of the entry for each list."""
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
