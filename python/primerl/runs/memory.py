"""Memory that training a model takes, roughly, and what this machine has. Standard library only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from primerl.train.model import footprint

ASK_S = 10.0
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Limits of a container, by the two versions of control groups."""


@dataclass(frozen=True, slots=True)
class Machine:
    bytes: int
    what: str
    """Whose memory that is: `this machine`, `2 GPUs`."""
    half: bool = False
    """Whether the model computes in bf16 weights of its own there. Divided among GPUs it is in fp32."""

    def all_of(self, parameters: int) -> int:
        """Bytes to train all of a model, without activations and the engine's own copy."""
        return footprint.bytes_to_train(parameters, half=self.half)

    def adapter_of(self, parameters: int) -> int:
        """The same of an adapter to it."""
        return footprint.bytes_to_adapt(parameters, half=self.half)


def machine() -> Machine:
    """The GPUs together, as the trainer's ranks divide the model among them; where there is none, the main memory."""
    gpus = _gpus()
    if gpus:
        what = "this machine's GPU" if len(gpus) == 1 else f"this machine's {len(gpus)} GPUs"
        return Machine(sum(gpus), what, half=len(gpus) == 1)
    return Machine(main_memory(), "this machine")


def main_memory() -> int:
    """Bytes of this machine, or of the container that this process is in."""
    there = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # `max`, or no such group
            there.append(int(file.read_text(encoding="utf-8")))
    return min(there)


def _gpus() -> list[int]:
    """Bytes of each, as the driver says it; torch, which knows too, takes seconds to import."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_S, check=True, encoding="utf-8", errors="replace"
        )
        found = [int(line) * 2**20 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return found[: sum(one.strip() not in ("", "-1") for one in visible.split(","))]
