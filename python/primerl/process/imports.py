"""Shorter starts of the processes that import torch, transformers or verifiers. Needs the standard library only."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For heavy imports and loading: no garbage collection meanwhile, and none of what is there later.

    Imports make a million objects that all stay. Walking them again and again is a sixth of the time they take, and
    once more, at the exit, a matter of seconds. For processes of our own: a training script keeps what it has made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
