"""Shorter starts of the processes that import torch, transformers or verifiers. Needs the standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


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


def load_torch_libraries() -> None:
    """Have a thread load the shared libraries of torch, which takes a quarter of a second without the interpreter's
    lock: a process that does something else first has imported torch that much sooner. Without them, or where they
    cannot be loaded, the import is as before.

    Call it after everything is set that they read when they are loaded (`OMP_WAIT_POLICY`, for one).
    """
    threading.Thread(target=_load_torch_libraries, name="torch libraries", daemon=True).start()


def _load_torch_libraries() -> None:
    from primerl.process.cuda import has_cuda

    if has_cuda():
        return  # torch loads CUDA's in an order of its own, so that it gets none of another version
    found = find_spec("torch")
    for folder in found.submodule_search_locations or () if found else ():
        for library in Path(folder).glob("lib/libtorch_python.*"):
            # Whose error would be that of the import, which says more.
            with contextlib.suppress(OSError):
                ctypes.CDLL(os.fspath(library), mode=os.RTLD_LAZY)
