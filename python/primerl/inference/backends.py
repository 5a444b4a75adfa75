"""Which engine backends there are: the only place that names them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from primerl.inference.backend import EngineBackend
from primerl.process import plugins

GROUP = "primerl.engine_backends"
AUTO, DEFAULT = "auto", "torch"
BUILT_IN = {
    "vllm": "primerl.inference.vllm.backend:VllmBackend",
    "torch": "primerl.inference.torch.backend:EmbeddedBackend",
}
"""In the order in which `auto` asks them; the last one works everywhere."""
SMALLEST_FIRST = tuple(reversed(BUILT_IN))


@cache
def named(name: str) -> EngineBackend:
    """By its name or import path. Raises PluginError."""
    found = plugins.find(GROUP, name, BUILT_IN)
    backend = plugins.make(name, found) if callable(found) else found
    if not isinstance(backend, EngineBackend):
        raise plugins.PluginError(
            f"{name!r} is no engine backend; derive it from primerl.inference.backend.EngineBackend"
        )
    return backend


def chosen(wanted: str, python: str | None) -> str:
    """The name of a backend, for `auto` too."""
    if wanted != AUTO:
        return wanted
    return next((name for name in BUILT_IN if named(name).is_preferred(python)), DEFAULT)


def check_name(name: str) -> str:
    """Raises PluginError where there is no such backend. None of ours is imported."""
    if name != AUTO and name not in BUILT_IN:
        named(name)
    return name


def check_options(backend: str, options: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> None:
    """The options of backends that are not ours, and each table of a backend of ours. Raises ValueError."""
    for name, table in tables.items():
        if table:
            named(name).check_options(table)
    if backend in (AUTO, *BUILT_IN):
        if options:
            raise ValueError(f"options: are for a backend of your own, not for backend = {backend!r}; omit them")
        return
    try:
        named(backend).check_options(options)
    except ValueError:
        raise
    except Exception as error:  # such as a KeyError of an option that is not there
        raise ValueError(f"options: {backend!r} fails to check them: {type(error).__name__}: {error}") from error
