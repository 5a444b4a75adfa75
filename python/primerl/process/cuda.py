"""Whether this machine has a CUDA GPU: asks the driver, since importing torch takes seconds. Standard library only."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def has_cuda() -> bool:
    """Whether CUDA sees a GPU (`CUDA_VISIBLE_DEVICES` counts)."""
    loaded = driver()
    if loaded is None:
        return False
    count = ctypes.c_int(0)
    return loaded.cuInit(0) == 0 and loaded.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def driver() -> ctypes.CDLL | None:
    """CUDA's driver, not initialised; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
