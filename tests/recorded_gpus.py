"""Machines with GPUs as NVML describes them, through a module in place of `pynvml` that has what primerl asks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

H100 = "NVIDIA H100 80GB HBM3"
H100_BYTES = 85_520_809_984
"""81559 MiB, as nvidia-smi shows it."""
PART_BYTES = 10_468_982_784
"""1g.10gb."""


def whole(number: int, numa: int | None = 0) -> dict[str, Any]:
    return {"uuid": f"GPU-{number:08d}-aaaa", "name": H100, "memory": H100_BYTES, "numa": numa}


def divided(number: int, parts: int) -> dict[str, Any]:
    own = [
        {"uuid": f"MIG-{number:04d}-{part:04d}", "name": f"{H100} MIG 1g.10gb", "memory": PART_BYTES}
        for part in range(parts)
    ]
    return {**whole(number), "parts": own}


EIGHT_H100 = [whole(number, 0 if number < 4 else 1) for number in range(8)]
MACHINES: dict[str, list[dict[str, Any]] | None] = {
    "8xH100": EIGHT_H100,
    "1xH100": [whole(0)],
    "old driver": [{**whole(0, None)}],
    "MIG": [divided(0, 3)],
    "MIG and whole": [divided(0, 2), whole(1)],
    "MIG without parts": [divided(0, 0)],
    "none": [],
    "no driver": None,
}


class NVMLError(Exception):
    pass


def nvml(machine: list[dict[str, Any]] | None) -> ModuleType:
    module: Any = ModuleType("pynvml")
    open_ones: list[int] = []

    def init() -> None:
        if machine is None:
            raise NVMLError("NVML Shared Library Not Found")
        open_ones.append(1)

    def by_index(index: int) -> dict[str, Any]:
        assert open_ones
        assert machine is not None
        return machine[index]

    def mode(gpu: dict[str, Any]) -> list[int]:
        if gpu["numa"] is None:
            raise NVMLError("Not Supported")
        return [int("parts" in gpu)] * 2

    def part(gpu: dict[str, Any], index: int) -> dict[str, Any]:
        # The slots of three sevenths of a GPU are not the first ones.
        if index % 2 == 0 or index // 2 >= len(gpu["parts"]):
            raise NVMLError("Not Found")
        found: dict[str, Any] = gpu["parts"][index // 2]
        return found

    def numa(gpu: dict[str, Any]) -> int:
        if gpu["numa"] is None:
            raise NVMLError("Not Supported")
        found: int = gpu["numa"]
        return found

    class Memory:
        def __init__(self, total: int) -> None:
            self.total = total

    module.NVMLError = NVMLError
    module.NVML_DEVICE_MIG_ENABLE = 1
    module.nvmlInit, module.nvmlShutdown = init, open_ones.clear
    module.nvmlDeviceGetCount = lambda: len(machine or [])
    module.nvmlDeviceGetHandleByIndex = by_index
    module.nvmlDeviceGetMigMode = mode
    module.nvmlDeviceGetMaxMigDeviceCount = lambda _gpu: 7
    module.nvmlDeviceGetMigDeviceHandleByIndex = part
    module.nvmlDeviceGetUUID = lambda gpu: gpu["uuid"]
    module.nvmlDeviceGetName = lambda gpu: gpu["name"].encode()
    module.nvmlDeviceGetMemoryInfo = lambda gpu: Memory(gpu["memory"])
    module.nvmlDeviceGetNumaNodeId = numa
    return module  # type: ignore[no-any-return]


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has those GPUs, and CUDA may see all of them."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(MACHINES[name]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
