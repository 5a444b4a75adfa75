"""From a command line to a checked config, or one clear message."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import pydantic_config
from pydantic import BaseModel, ValidationError

from primerl.config.command_line import flags
from primerl.config.command_line.arguments import Location, asks_for_help, place_of, split
from primerl.config.command_line.log_variable import with_level
from primerl.config.command_line.sources import read, sources
from primerl.config.errors.fail import ConfigError
from primerl.config.errors.validation_errors import describe

C = TypeVar("C", bound=BaseModel)
# Lists of paths that are relative to the file that names them.
PATHS = {"env_files", "env_file"}


def load(cls: type[C], arguments: list[str], *, program: str) -> C:
    """Reads `@ file.toml` and dotted overrides into `cls`. Exits 0 after `--help`.

    Raises [`ConfigError`][] for anything that is wrong with them.
    """
    show_help(cls, arguments, program)
    from primerl.config.foreign import loading  # which reads files too

    try:
        given = loading.given(cls, arguments, *of_files(arguments))
        tree = with_flags(cls, given.tree, given.flags)
        try:
            config = cls.model_validate(with_level(cls, tree))
        except ValidationError as error:
            raise ConfigError(describe(error, cls, arguments, given.written_at)) from None
        given.check()
        return config
    except RecursionError:
        files = [file for file, _ in sources(arguments)]
        raise ConfigError(
            f"{' and '.join([*files, 'the command line'])}: a value is nested too deeply to be read; "
            "no key needs more than a few levels"
        ) from None


def show_help(cls: type[BaseModel], arguments: list[str], program: str) -> None:
    """Prints help where it is asked for, and exits 0."""
    if not asks_for_help(arguments):
        return
    from primerl.config.describe import forms
    from primerl.config.describe import help as config_help

    form = forms.form_of(cls)
    if form is None:
        pydantic_config.cli(cls, args=["--help"], prog=program)
        raise SystemExit(0)
    try:
        print(config_help.text(form, arguments, program))
    except config_help.UnknownFieldError as error:
        raise ConfigError(str(error)) from None
    raise SystemExit(0)


def compose(cls: type[BaseModel], arguments: list[str]) -> dict[str, Any]:
    """From the files and flags of a command line to one tree, which the config's class then checks.

    Files for the whole come first, in their order, then files for a section (`--trainer @ trainer.toml`), in theirs;
    tables are merged, of one key the later file's counts, and flags win over all files.

    Raises:
        ConfigError: A file or a flag cannot be read; two flags contradict each other; an entry does not exist.
    """
    tree, given = of_files(arguments)
    return with_flags(cls, tree, given)


def of_files(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The tree of a command line's files, and the flags. Raises ConfigError: A file cannot be read."""
    files, given = split(arguments)
    tree: dict[str, Any] = {}
    for file, flag in files:
        if file is None:
            raise ConfigError("nothing follows `@`; give the path of a TOML file after it")
        place = place_of(flag) if flag else ()
        tree = with_value(tree, place, read(file) if place else _found_beside(file, read(file)), flag)
    return tree, given


def with_flags(cls: type[BaseModel], tree: dict[str, Any], given: list[str]) -> dict[str, Any]:
    """The tree with what flags set. Raises ConfigError as `compose`."""
    for name, place, value in flags.read(cls, given):
        tree = with_value(tree, place, value, name)
    return tree


def _found_beside(file: str, tree: dict[str, Any]) -> dict[str, Any]:
    """With the paths of files that exist in the config file's folder, so that it may be used from any folder; others
    are relative to the working directory."""
    found = dict(tree)
    for key in PATHS & tree.keys():
        if isinstance(tree[key], list):
            found[key] = [_path_beside(file, path) if isinstance(path, str) else path for path in tree[key]]
    return found


def _path_beside(file: str, path: str) -> str:
    beside = Path(os.path.abspath(file)).parent / path
    return os.fspath(beside) if not path.startswith("~") and beside.is_file() else path


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, everything else of `over` replaces what is there."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(result.get(key), dict) and isinstance(value, dict)
        result[key] = merged(result[key], value) if both else value
    return result


def with_value(tree: Any, path: Location, value: Any, flag: str) -> Any:
    """The tree with the value at that place, merged where both are tables."""
    if not path:
        return merged(tree, value) if isinstance(tree, dict) and isinstance(value, dict) else value
    first, rest = path[0], path[1:]
    if isinstance(first, int) and isinstance(tree, list):
        if first > len(tree):
            raise ConfigError(f"{flag}: there are {len(tree)} entries, counted from 0; the next one is {len(tree)}")
        entries = deepcopy(tree) if first < len(tree) else [*tree, {}]
        entries[first] = with_value(entries[first], rest, value, flag)
        return entries
    if isinstance(first, int):
        # The list is not in any file.
        return with_value([], path, value, flag) if tree in (None, {}) else tree
    if not isinstance(tree, dict):
        tree = {}
    inner = tree.get(first, {} if rest or isinstance(value, dict) else None)
    return {**tree, first: with_value(inner, rest, value, flag)}
