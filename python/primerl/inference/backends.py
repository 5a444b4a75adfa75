"""Which engine backends there are: the only place that names them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from primerl.inference.backend import EngineBackend, UnservableError
from primerl.process import plugins

GROUP = "primerl.engine_backends"
AUTO, DEFAULT = "auto", "torch"
BUILT_IN = {
    "vllm": "primerl.inference.vllm.backend:VllmBackend",
    "torch": "primerl.inference.torch.backend:EmbeddedBackend",
    "transformers": "primerl.inference.transformers.backend:TransformersBackend",
}
EVERYWHERE = ("torch", "transformers")
"""Those that work on any machine: `auto` takes the first one that serves the model, if none is preferred here."""
SMALLEST_FIRST = (*EVERYWHERE, "vllm")


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


def chosen(wanted: str, python: str | None, folder: Path) -> str:
    """The name of a backend, for `auto` too. `folder`: of the model; where none serves it, the default says why."""
    if wanted != AUTO:
        return wanted
    preferred = (name for name in BUILT_IN if named(name).is_preferred(python))
    return next(preferred, None) or next((name for name in EVERYWHERE if _serves(name, folder, python)), DEFAULT)


def vllm_options(wanted: str, found: str, given: Mapping[str, Any], *, trusted: bool) -> dict[str, Any]:
    """`[inference.vllm]` for an engine of the backend `found`, which was chosen for `wanted`. `trusted`: code of the
    model may be run."""
    if found in EVERYWHERE:
        # A backend that was asked for by name refuses them itself. `auto` takes these on machines without vLLM.
        return {} if wanted == AUTO else dict(given)
    return {**({"trust-remote-code": True} if trusted else {}), **given}


def _serves(name: str, folder: Path, python: str | None) -> bool:
    try:
        named(name).check_model(folder, python)
    except UnservableError:
        return False
    return True


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
            words = f"are for a backend of your own, not for backend = {backend!r}; omit them"
            raise UnservableError.at("options", words)
        return
    try:
        named(backend).check_options(options)
    except ValueError:
        raise
    except Exception as error:  # such as a KeyError of an option that is not there
        words = f"{backend!r} fails to check them: {type(error).__name__}: {error}"
        raise UnservableError.at("options", words) from error
