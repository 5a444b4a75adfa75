"""Chooses a placement by its name: a built-in one, one that an installed package brings, or `module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.config.schema.services import Deployment
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Placement
from primerl.process import plugins
from primerl.train.import_path import ImportFailedError, find_by_path

GROUP = "primerl.placements"
"""Entry points of packages: a name, and the class or the function that makes the placement."""
BUILT_IN: dict[str, Callable[..., Placement]] = {"local": LocalPlacement}


def chosen(deployment: Deployment) -> Placement:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] for one that does not exist, or does not
    take its arguments."""
    made_by = _find(deployment.type)
    try:
        signature(made_by).bind(**deployment.args)
    except TypeError as error:
        raise ConfigError(f"deployment.args: {deployment.type!r} does not take these args: {error}") from None
    return made_by(**deployment.args)


def _find(name: str) -> Callable[..., Placement]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    try:
        if ":" in name:
            found: Any = find_by_path(name)
        else:
            installed = plugins.entry_point(GROUP, name)
            if installed is None:
                known = ", ".join(map(repr, plugins.names(GROUP, BUILT_IN)))
                raise ConfigError(
                    f"deployment.type: there is no placement {name!r}; there are {known}. Install the package that "
                    "brings it, or name a class of your own as module:Class"
                )
            found = installed.load()
    except (ImportFailedError, ImportError, AttributeError) as error:
        raise ConfigError(f"deployment.type: {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"deployment.type: {name!r} names no class or function")
    made_by: Callable[..., Placement] = found
    return made_by
