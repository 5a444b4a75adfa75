"""Asynchronous reinforcement-learning post-training for language models.

Importing this package imports neither torch nor the extension module: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primerl._core import NotExtendableError as NotExtendableError
    from primerl._core import PrimerlError as PrimerlError
    from primerl._core import RenderError as RenderError
    from primerl.api import Batch as Batch
    from primerl.api import MicroBatch as MicroBatch
    from primerl.api import Run as Run
    from primerl.api import connect as connect
    from primerl.config.errors.fail import ConfigError as ConfigError
    from primerl.launch.supervise.failures import RunFailedError as RunFailedError

_LAZY = {
    "Batch": "primerl.api",
    "ConfigError": "primerl.config.errors.fail",
    "MicroBatch": "primerl.api",
    "NotExtendableError": "primerl._core",
    "PrimerlError": "primerl._core",
    "RenderError": "primerl._core",
    "Run": "primerl.api",
    "RunFailedError": "primerl.launch.supervise.failures",
    "__version__": "primerl._core",
    "connect": "primerl.api",
}

__all__ = [
    "Batch",
    "ConfigError",
    "MicroBatch",
    "NotExtendableError",
    "PrimerlError",
    "RenderError",
    "Run",
    "RunFailedError",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        from primerl.process.extras import explained

        raise explained(error, f"primerl.{name}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
