"""Monitors by their path."""

from __future__ import annotations

from inspect import signature
from typing import Any

from primerl.config.schema.monitors import MonitorEntry
from primerl.monitors.monitor import Monitor, RefusedError
from primerl.train.import_path import ImportFailedError, find_by_path


def find(path: str, args: dict[str, Any]) -> Any:
    """The class, or a function that makes a monitor. Raises ValueError where there is none, or it does not take these
    arguments."""
    try:
        made_by = find_by_path(path)
    except ImportFailedError as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error
    if not callable(made_by):
        module, _, name = path.partition(":")
        raise ValueError(f"module {module} has no class {name!r}")
    try:
        signature(made_by).bind(**args)
    except TypeError as error:
        raise ValueError(f"{path!r} does not take these args: {error}") from None
    missing = [call for call in ("start", "log", "finish") if isinstance(made_by, type) and not hasattr(made_by, call)]
    if missing:
        raise ValueError(f"{path!r} has no {', '.join(missing)}; derive it from primerl.monitors.Monitor")
    return made_by


def load(entry: MonitorEntry) -> Monitor:
    """Raises RefusedError, and whatever its constructor raises."""
    try:
        made_by = find(entry.path, entry.args)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    monitor: Monitor = made_by(**entry.args)
    return monitor
