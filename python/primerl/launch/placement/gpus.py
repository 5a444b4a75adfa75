"""The GPUs of this machine, by the names that CUDA_VISIBLE_DEVICES takes. Nothing that creates a CUDA context.

NVML (nvidia-ml-py) ──> a whole GPU: its number, memory, NUMA node      MIG: one entry for each part, by its UUID
no NVML             ──> the driver's files: numbers only
no driver           ──> none
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

Answer = TypeVar("Answer")

DRIVER = Path("/proc/driver/nvidia/gpus")
VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""How NVML counts GPUs; CUDA by itself counts the fastest first."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    """As CUDA_VISIBLE_DEVICES takes it."""
    uuid: str = ""
    model: str = ""
    memory: int | None = None
    """Bytes; None where the driver does not say."""
    numa: int | None = None
    """The NUMA node that it is next to."""
    is_part: bool = False
    """A part of a GPU (MIG). A process sees one of them at a time, and NCCL connects none."""


def found(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> list[str]:
    """Names of those that CUDA would see here."""
    return [one.name for one in visible(environment, driver)]


def visible(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> list[Gpu]:
    """As CUDA counts them: up to the first invalid name, where the variable is set; else all of the machine."""
    there = machine(driver)
    named = environment.get(VARIABLE)
    if named is None:
        return there
    gpus: list[Gpu] = []
    for name in named.split(","):
        if name.strip() in ("", "-1"):
            break
        gpus.append(_named(name.strip(), there))
    return gpus


def _named(name: str, there: list[Gpu]) -> Gpu:
    """By its number or the beginning of its UUID; one that the driver does not know is left to CUDA."""
    for one in there:
        if one.name == name or (one.uuid and name.startswith(("GPU-", "MIG-")) and one.uuid.startswith(name)):
            return Gpu(name, one.uuid, one.model, one.memory, one.numa, one.is_part)
    return Gpu(name, is_part=name.startswith("MIG-"))


def machine(driver: Path = DRIVER) -> list[Gpu]:
    """All GPUs of this machine."""
    found = _asked(_by_nvml)
    if found is not None:
        return found
    try:
        return [Gpu(str(index)) for index, _ in enumerate(driver.iterdir())]
    except OSError:
        return []


def driver_version() -> str | None:
    """None where NVML is not there."""
    return _asked(lambda nvml: _text(nvml.nvmlSystemGetDriverVersion()))


def _asked(question: Callable[[Any], Answer]) -> Answer | None:
    """What NVML answers; None without the package, or the driver's library."""
    with contextlib.suppress(Exception):
        nvml = import_module("pynvml")  # of nvidia-ml-py
        nvml.nvmlInit()
        try:
            return question(nvml)
        finally:
            nvml.nvmlShutdown()
    return None


def _by_nvml(nvml: Any) -> list[Gpu]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    parts = [_parts(nvml, handle) for handle in handles]
    gpus: list[Gpu] = []
    for index, (handle, own) in enumerate(zip(handles, parts, strict=True)):
        if own is None:
            # A list that names parts, by their UUIDs, may not have numbers.
            name = _uuid(nvml, handle) if any(one is not None for one in parts) else str(index)
            gpus.append(_described(nvml, handle, name, _numa(nvml, handle), is_part=False))
        else:
            numa = _numa(nvml, handle)
            gpus += [_described(nvml, part, _uuid(nvml, part), numa, is_part=True) for part in own]
    return gpus


def _parts(nvml: Any, handle: Any) -> list[Any] | None:
    """Its parts, none for one that is divided and has no part yet; None for a whole GPU."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # this kind cannot be divided
        return None
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    parts = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # a slot without a part
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return parts


def _described(nvml: Any, handle: Any, name: str, numa: int | None, *, is_part: bool) -> Gpu:
    memory, model = None, ""
    with contextlib.suppress(nvml.NVMLError):
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    with contextlib.suppress(nvml.NVMLError):
        model = _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(name, _uuid(nvml, handle), model, memory, numa, is_part)


def _uuid(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(handle))


def _numa(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetNumaNodeId(handle))
    except (nvml.NVMLError, AttributeError):  # an older driver, or package
        return None


def _text(given: Any) -> str:
    """Older packages give bytes."""
    return given.decode() if isinstance(given, bytes) else str(given)
