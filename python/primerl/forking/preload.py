"""What each kind of fork server imports before it forks.

Two kinds, not one: they import side by side, env workers keep free of torch, and what a server holds counts against
the memory limit of an env worker. Nothing here may start a thread, compute in parallel, or ask for CUDA; nor import an
environment's own package, whose code is to be that of the day of the process.
"""

from __future__ import annotations

import contextlib
from importlib import import_module

from primerl.inference import backends
from primerl.train.model.import_once import import_transformers

ENVIRONMENTS, TORCH = "environments", "torch"

# None of them starts a thread until it is used.
MODULES = {
    ENVIRONMENTS: ("primerl._core", "primerl.cli.processes", "primerl.envs.worker"),
    TORCH: (
        "primerl._core",
        "primerl.cli.processes",
        "primerl.inference.server",
        "primerl.train.loop.rl",
        "primerl.train.loop.sft",
        # Imported when the first model is made, and torch._dynamo by the first optimizer.
        "transformers.models.auto.modeling_auto",
        "torch._dynamo",
    ),
}


def preload(kind: str) -> None:
    """A library that is missing or broken is left to the processes that need it, which say so themselves."""
    if kind == TORCH:
        with contextlib.suppress(ImportError):
            import_transformers()
    engines = [name for one in backends.BUILT_IN for name in backends.named(one).preload] if kind == TORCH else []
    for name in [*MODULES.get(kind, ()), *engines]:  # of any other kind, nothing
        with contextlib.suppress(ImportError):
            import_module(name)
    if kind == ENVIRONMENTS:
        _verifiers()


def _verifiers() -> None:
    from primerl.envs.generations import choice
    from primerl.envs.interface import EnvironmentRefusedError

    with contextlib.suppress(EnvironmentRefusedError, ImportError):
        choice.prepare()
