"""Which monitors there are: ours, those of other packages by their entry points' names, and any by its import path."""

from __future__ import annotations

from inspect import signature
from typing import Any

from primerl.config.schema.monitors import MonitorEntry
from primerl.monitors.monitor import Monitor, RefusedError
from primerl.process import plugins

GROUP = "primerl.monitors"
BUILT_IN = {
    "wandb": "primerl.monitors.services.weights_and_biases:WandbMonitor",
    "prime": "primerl.monitors.services.prime:PrimeMonitor",
}
FORMER = {
    "primerl.monitors.weights_and_biases:WandbMonitor": "wandb",
    "primerl.monitors.prime:PrimeMonitor": "prime",
}
"""Names in `configs/monitor.toml` files that earlier versions have written."""


def find(path: str, args: dict[str, Any]) -> Any:
    """The class, or a function that makes a monitor. Raises ValueError where there is none, or it does not take these
    arguments."""
    made_by = plugins.find(GROUP, FORMER.get(path, path), BUILT_IN)
    if not callable(made_by):
        raise ValueError(f"{path!r} is no class")
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
