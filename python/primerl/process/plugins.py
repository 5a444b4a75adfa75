"""Parts that other packages may add: found by name among ours and their entry points, or by import path.

    built-in      `wandb`                 a table of ours: name -> `module:name`
    entry point   `acme`                  [project.entry-points."primerl.monitors"] of an installed package
    import path   `acme.monitor:Monitor`  a module that can be imported here

Standard library only. Nothing is imported but what is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from typing import Any

from primerl.process.import_path import ImportFailedError, find_by_path

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class PluginError(ValueError):
    """No such part, or it cannot be imported. The message names it and says what there is."""


def names(group: str, built_in: Iterable[str]) -> list[str]:
    """What can be chosen by name here."""
    return list(dict.fromkeys([*built_in, *sorted(metadata.entry_points(group=group).names)]))


def entry_point(group: str, name: str) -> metadata.EntryPoint | None:
    """The one of an installed package; None where none has that name."""
    return next(iter(metadata.entry_points(group=group, name=name)), None)


def find(group: str, name: str, built_in: Mapping[str, str]) -> Any:
    """What `name` names. A built-in name cannot be taken by an entry point. Raises PluginError."""
    if name in built_in:
        module, _, attribute = built_in[name].partition(":")
        return getattr(import_module(module), attribute)
    if IMPORT_PATH.fullmatch(name):
        return _by_path(name)
    if found := entry_point(group, name):
        try:
            return found.load()
        except (Exception, SystemExit) as error:  # whatever importing the package raises
            raise PluginError(
                f"{name!r}, the entry point {found.value} of {group}, cannot be loaded: {type(error).__name__}: {error}"
            ) from error
    known = ", ".join(map(repr, names(group, built_in))) or "none"
    raise PluginError(
        f"there is no {name!r}; known are {known}; for one of your own install a package with an entry point in "
        f"{group}, or give its import path, module:name"
    )


def make(name: str, made_by: Any, *args: Any, keep: tuple[type[Exception], ...] = (), **kwargs: Any) -> Any:
    """What the class or function that `name` names makes. Raises PluginError, or of `keep` what it raises itself."""
    if not callable(made_by):
        raise PluginError(f"{name!r} names no class or function")
    try:
        return made_by(*args, **kwargs)
    except keep:
        raise
    except Exception as error:
        raise PluginError(f"{name!r} cannot be made: {type(error).__name__}: {error}") from error


def _by_path(path: str) -> Any:
    try:
        found = find_by_path(path)
    except ImportFailedError as error:
        raise PluginError(f"{path!r} cannot be imported: {error}") from error
    if found is None:
        module, _, attribute = path.partition(":")
        raise PluginError(f"module {module} has no {attribute!r}")
    return found
