"""A taskset whose examples end or block the process that they run in, or measure what is no number."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

__all__ = ["UnrulyTaskset"]

KINDS = ["plain"]


class UnrulyConfig(vf.TasksetConfig):
    kinds: list[str] = KINDS
    once: str = ""
    """File that the first to misbehave writes, after which all behave; all misbehave where it is left out."""


class UnrulyData(vf.TaskData):
    kind: str
    once: str


class UnrulyTask(vf.Task[UnrulyData]):
    @vf.reward
    async def conduct(self, trace: vf.Trace) -> float:
        kind = self.data.kind
        if self.data.once:
            if Path(self.data.once).exists():
                return 1.0
            if kind != "plain":
                Path(self.data.once).touch()
        if kind == "waits":
            await asyncio.Event().wait()
        if kind == "exits":
            sys.exit("no licence for this")
        if kind == "exits_in_a_task":
            await asyncio.create_task(_exit())
        if kind == "interrupts":
            raise KeyboardInterrupt
        if kind == "dies":
            os._exit(7)
        if kind == "blocks":
            time.sleep(3600)
        if kind == "spins":
            while True:
                pass
        return 1.0

    @vf.metric
    async def measured(self, trace: vf.Trace) -> dict[str, Any]:
        return {"truth": True, "whole": 3, "none": None, "word": "0.5", "endless": float("inf")}


async def _exit() -> None:
    sys.exit(3)


class UnrulyTaskset(vf.Taskset[UnrulyTask, UnrulyConfig]):
    def load(self) -> Iterator[Any]:
        config = self.config
        for kind in config.kinds:
            yield UnrulyTask(UnrulyData(prompt=f"{kind}?", kind=kind, once=config.once), config.task)
