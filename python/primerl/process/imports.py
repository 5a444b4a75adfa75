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
    cannot be loaded, the import is as before. So it is where a GPU has its driver: torch itself has to load CUDA's
    libraries there, in an order by which it gets none of another version.

    Call it after everything is set that they read when they are loaded (`OMP_WAIT_POLICY`, for one).
    """
    from primerl.process.cuda import driver

    found = find_spec("torch")
    if found is None or driver() is not None:
        return
    # A thread has to wait for the lock whenever it has read a file: all but the call is done here.
    folders = map(Path, found.submodule_search_locations or ())
    libraries = [os.fsencode(library) for folder in folders for library in folder.glob("lib/libtorch_python.*")]
    # As a function, which gives up the lock; `ctypes.CDLL` keeps it before Python 3.12. Errors are left to the import.
    load = ctypes.CDLL(None).dlopen
    for library in libraries:
        threading.Thread(target=load, args=(library, os.RTLD_LAZY), name="torch libraries", daemon=True).start()
