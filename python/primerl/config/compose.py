"""From the files and flags of a command line to one tree, as far as the config library does not do it itself.

Files for the whole come first, in their order, then files for a section (`--trainer @ trainer.toml`), in theirs; tables
are merged, of one key the later file's counts, and flags win over all files. What is added to the library's rules:
several files for one section are merged too, and a flag may name an entry of a list of tables by its number
(`--orchestrator.train.env.0.ratio 2`).
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from primerl.config.command_line import place_of, split
from primerl.config.fields import Knob, Table, find, table_of
from primerl.config.lines import Location
from primerl.config.load import ConfigError

# Lists of paths that are relative to the file that names them.
PATHS = {"env_files", "env_file"}


class Given(BaseModel):
    """What files hold, unchecked: the config library merges it with the flags and checks the whole once."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def compose(cls: type[BaseModel], arguments: list[str]) -> tuple[Given, list[str]]:
    """The tree of all files with single entries of lists set, and the flags that are left for the config library.

    Raises:
        ConfigError: A file cannot be read; two flags contradict each other; an entry does not exist.
    """
    files, flags = split(arguments)
    tree: dict[str, Any] = {}
    for file, flag in files:
        if file is None:
            raise ConfigError("@ stands last; give the path of a TOML file after it")
        place = place_of(flag) if flag else ()
        tree = _with(tree, place, read(file) if place else _found_beside(file, read(file)), flag)
    _check_switches(cls, flags)
    entries, rest = _entries(cls, flags)
    for flag, value in entries:
        _check_whole_list(flag, rest)
        tree = _with(tree, place_of(flag), value, flag)
    return Given(**tree), rest


def read(file: str) -> dict[str, Any]:
    """A file's tables. TOML, unless its name ends in .json, .yaml or .yml.

    Raises:
        ConfigError: It is not there, cannot be read or holds no tables.
    """
    kind = Path(file).suffix.lower()
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"Config file not found: {file}; give the path of a TOML file after `@`") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give the path of a TOML file after `@`") from None
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


def _found_beside(file: str, tree: dict[str, Any]) -> dict[str, Any]:
    """With the paths of files that are there beside the config file, so that it may be used from any folder; others are
    left for the working directory."""
    found = dict(tree)
    for key in PATHS & tree.keys():
        if isinstance(tree[key], list):
            found[key] = [_path_beside(file, path) if isinstance(path, str) else path for path in tree[key]]
    return found


def _path_beside(file: str, path: str) -> str:
    beside = Path(os.path.abspath(file)).parent / path
    return os.fspath(beside) if not path.startswith("~") and beside.is_file() else path


def _words_of(error: Exception) -> str:
    """Without the line itself, which PyYAML shows and which may hold a key."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    # Names of anchors and tags are the user's; what stands between < and > is the grammar's, and a character is no key.
    problem = re.sub(r"'[^'<][^']+'|\"[^\"]*\"", "something else", problem)
    return f"{problem} (at line {mark.line + 1}, column {mark.column + 1})"


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, everything else of `over` replaces what is there."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(result.get(key), dict) and isinstance(value, dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _with(tree: Any, path: Location, value: Any, flag: str) -> Any:
    """The tree with the value at that place, merged where both are tables."""
    if not path:
        return merged(tree, value) if isinstance(tree, dict) and isinstance(value, dict) else value
    first, rest = path[0], path[1:]
    if isinstance(first, int) and isinstance(tree, list):
        if first > len(tree):
            raise ConfigError(
                f"{flag.split('=', 1)[0]}: there are {len(tree)} entries, counted from 0; the next one is {len(tree)}"
            )
        entries = deepcopy(tree) if first < len(tree) else [*tree, {}]
        entries[first] = _with(entries[first], rest, value, flag)
        return entries
    if isinstance(first, int):
        # The list is not in any file.
        return _with([], path, value, flag) if tree in (None, {}) else tree
    if not isinstance(tree, dict):
        tree = {}
    return {**tree, first: _with(tree.get(first, {} if rest or isinstance(value, dict) else None), rest, value, flag)}


def _entries(cls: type[BaseModel], flags: list[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Flags that name an entry of a list by its number, with their values; and the others."""
    if not any(_numbered(flag) for flag in flags):
        return [], flags
    root = table_of(cls)
    entries: list[tuple[str, Any]] = []
    rest: list[str] = []
    i = 0
    while i < len(flags):
        flag, i = flags[i], i + 1
        if not _numbered(flag) or not _is_entry(root, flag):
            rest.append(flag)
            continue
        knob = find(root, flag.split("=", 1)[0])
        if "=" in flag:
            entries.append((flag, _value(flag.split("=", 1)[1], knob)))
        elif flag.startswith("--no-"):
            entries.append((flag, False))
        elif i < len(flags) and not flags[i].startswith("--"):
            entries.append((flag, _value(flags[i], knob)))
            i += 1
        else:
            entries.append((flag, {} if isinstance(knob, Table) else True))
    return entries, rest


def _numbered(flag: str) -> bool:
    return flag.startswith("--") and any(isinstance(part, int) for part in place_of(flag))


def _is_entry(root: Table, flag: str) -> bool:
    """Whether the first number comes after the name of a list of tables."""
    path = place_of(flag)
    number = next(i for i, part in enumerate(path) if isinstance(part, int))
    lists = {knob.path for knob in root.all_knobs() if knob.kind == "list of tables"}
    return ".".join(str(part) for part in path[:number]) in lists


def _value(text: str, knob: Knob | Table | None) -> Any:
    """JSON where it is some; a string where the field wants one, or it is no JSON."""
    if text == "None":
        return None
    if isinstance(knob, Knob) and "string" in knob.kind and not text.startswith("["):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)
    return text if found is None else found


def _check_whole_list(flag: str, rest: list[str]) -> None:
    """Which of the two comes first would decide."""
    path = place_of(flag)
    number = next(i for i, part in enumerate(path) if isinstance(part, int))
    for other in rest:
        if other.startswith("--") and place_of(other) == path[:number]:
            raise ConfigError(
                f"{other.split('=', 1)[0]} gives the whole list, and {flag.split('=', 1)[0]} an entry of it; put the "
                "entry's keys into the list"
            )


def _check_switches(cls: type[BaseModel], flags: list[str]) -> None:
    negated = [flag for flag in flags if flag.startswith("--no-") and "=" not in flag]
    if not negated:
        return
    root = table_of(cls)
    for flag in negated:
        path = place_of(flag)
        found = find(root, flag)
        if find(root, "no_" + flag.removeprefix("--no-")) is not None:
            continue  # a key whose name begins so
        if isinstance(found, Table):
            if not found.has_none:
                raise ConfigError(
                    f"{flag}: [{found.path}] is always there; --no- is for switches and optional sections"
                )
            inner = [other for other in flags if not other.startswith("--no-") and place_of(other)[: len(path)] == path]
            if any(other.startswith("--") for other in inner):
                raise ConfigError(
                    f"{flag} leaves [{found.path}] out, and {inner[0].split('=', 1)[0]} gives it; leave one of them out"
                )
        elif isinstance(found, Knob) and "true or false" not in found.kind:
            raise ConfigError(
                f"{flag}: {found.path} is no switch ({found.kind}); give --{flag.removeprefix('--no-')} VALUE"
                + (", or None to leave it out" if found.default == "left out" else "")
            )
