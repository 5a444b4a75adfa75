"""From the files and flags of a command line to one tree, which the config's class then checks.

Files for the whole come first, in their order, then files for a section (`--trainer @ trainer.toml`), in theirs; tables
are merged, of one key the later file's counts, and flags win over all files.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from primerl.config import flags
from primerl.config.command_line import place_of, split
from primerl.config.lines import Location
from primerl.config.load import ConfigError

# Lists of paths that are relative to the file that names them.
PATHS = {"env_files", "env_file"}


def compose(cls: type[BaseModel], arguments: list[str]) -> dict[str, Any]:
    """The tree, unchecked.

    Raises:
        ConfigError: A file or a flag cannot be read; two flags contradict each other; an entry does not exist.
    """
    files, given = split(arguments)
    tree: dict[str, Any] = {}
    for file, flag in files:
        if file is None:
            raise ConfigError("@ stands last; give the path of a TOML file after it")
        place = place_of(flag) if flag else ()
        tree = _with(tree, place, read(file) if place else _found_beside(file, read(file)), flag)
    for name, place, value in flags.read(cls, given):
        tree = _with(tree, place, value, name)
    return tree


def read(file: str) -> dict[str, Any]:
    """A file's tables. TOML, unless its name ends in .json, .yaml or .yml.

    Raises:
        ConfigError: It is not there, cannot be read or holds no tables.
    """
    kind = Path(file).suffix.lower()
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
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
            raise ConfigError(f"{flag}: there are {len(tree)} entries, counted from 0; the next one is {len(tree)}")
        entries = deepcopy(tree) if first < len(tree) else [*tree, {}]
        entries[first] = _with(entries[first], rest, value, flag)
        return entries
    if isinstance(first, int):
        # The list is not in any file.
        return _with([], path, value, flag) if tree in (None, {}) else tree
    if not isinstance(tree, dict):
        tree = {}
    return {**tree, first: _with(tree.get(first, {} if rest or isinstance(value, dict) else None), rest, value, flag)}
