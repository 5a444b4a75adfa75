"""Whether this machine has a CUDA GPU: asks the driver, since importing torch takes seconds. Standard library only."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def has_cuda() -> bool:
    """Whether CUDA sees a GPU (`CUDA_VISIBLE_DEVICES` counts)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
