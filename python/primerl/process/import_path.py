"""Imports what a config names as `module:name`, and tells from files alone what is missing. Standard library only."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class ImportFailedError(Exception):
    """The module cannot be imported; the message is what importing it raised."""


def import_by_path(module: str) -> ModuleType:
    """Raises ImportFailedError."""
    # A command that was installed does not look into the folder it is started in, as `python -m` does.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        raise ImportFailedError(f"{type(error).__name__}: {error}") from error


def find_by_path(path: str) -> Any:
    """What the module has under that name; None if it has nothing. Raises ImportFailedError."""
    module, _, name = path.partition(":")
    return getattr(import_by_path(module), name, None)


def located(module: str) -> ModuleSpec | None:
    """Where a module would be imported from; None where there is none. Nothing is imported, not even the packages that
    it is in, which `importlib.util.find_spec` would import."""
    found: ModuleSpec | None = None
    parts = module.split(".")
    for index in range(len(parts)):
        name = ".".join(parts[: index + 1])
        folders = None if found is None else found.submodule_search_locations
        if not parts[index] or (found is not None and folders is None):
            return None
        found = next(filter(None, _specs(name, folders)), None)
        if found is None:
            return None
    return found


def _specs(name: str, folders: Iterable[str] | None) -> Iterator[ModuleSpec | None]:
    """What each of Python's finders says; `folders`: of the package that it is in."""
    within = None if folders is None else list(folders)
    for finder in sys.meta_path:
        yield finder.find_spec(name, within)
    if within is None:
        yield PathFinder.find_spec(name, [str(Path.cwd())])


def missing(path: str) -> str | None:
    """What `find_by_path` will not find, as far as files tell; None where it will, or importing alone can tell."""
    module, _, name = path.partition(":")
    found = located(module)
    if found is None:
        return f"there is no module {module!r}; run from the folder that it is in, install it, or set PYTHONPATH"
    if found.origin is None or not found.origin.endswith(".py"):
        return None
    try:
        names = _names(ast.parse(Path(found.origin).read_bytes()))
    except SyntaxError as error:
        return f"{found.origin}, line {error.lineno}, is no Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{found.origin} cannot be read: {error}"
    if names is None or name in names:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give the name of a function in it"
    return f"{found.origin} has no {name!r}; {hint}"


def _names(module: ast.Module) -> set[str] | None:
    """What the module's own statements name, also within `if` and `try`; None where some are made by other means."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(module.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # what is within is not the module's
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)  # assigned, or used and so there
        nodes += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__", "globals", "exec"} else names
