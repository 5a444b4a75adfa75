"""Monitors by their path."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from primerl.config.monitors import MonitorEntry
from primerl.monitors.monitor import Monitor, RefusedError


def find(path: str, args: dict[str, Any]) -> Any:
    """The class, or a function that makes a monitor. Raises ValueError where there is none, or it does not take these
    arguments."""
    module, _, name = path.partition(":")
    # A command that was installed does not look into the folder it is started in, as `python -m` does.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        made_by = getattr(import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(made_by):
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
