"""The GPUs of this machine, by the names that CUDA_VISIBLE_DEVICES takes. Nothing that creates a CUDA context."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def found(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> list[str]:
    """As CUDA counts them: up to the first invalid name, where the variable is set; else all of the machine."""
    visible = environment.get(VARIABLE)
    if visible is None:
        return [str(index) for index in range(_count(driver))]
    names: list[str] = []
    for name in visible.split(","):
        if name.strip() in ("", "-1"):
            break
        names.append(name.strip())
    return names


def _count(driver: Path) -> int:
    with contextlib.suppress(Exception):  # without the package, or the driver's library, the driver's files tell
        pynvml = import_module("pynvml")  # of nvidia-ml-py, which vLLM requires
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    try:
        return sum(1 for _ in driver.iterdir())
    except OSError:
        return 0
