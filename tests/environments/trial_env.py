"""A taskset whose examples misbehave in every way an environment can; also its tools and hooks."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["TrialTaskset"]

KINDS = ["plain", "reward_raises", "reward_blocks", "setup_raises", "reward_is_nan", "never_ends"]


class TrialConfig(vf.TasksetConfig):
    kinds: list[str] = KINDS
    block_s: float = 2.0
    bounded: bool = True
    empty: bool = False


class TrialData(vf.TaskData):
    kind: str
    block_s: float


class TrialTask(vf.Task[TrialData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.kind == "setup_raises_at_length":
            raise RuntimeError("the world is not there" + " at all" * 100_000)
        if self.data.kind == "setup_raises":
            raise RuntimeError("the world is not there")
        if self.data.kind == "setup_cancels":
            raise asyncio.CancelledError
        if self.data.kind == "tells_a_secret":
            key = os.environ["JUDGE_KEY"]
            print(f"printed: {key}")
            subprocess.run(["sh", "-c", 'echo "by a child: $JUDGE_KEY" >&2'], check=True)
            sys.stderr.write(f"half a line: {key[:9]}")
            sys.stderr.write(f"{key[9:]}\n")
            raise RuntimeError(f"the judge refused {key}")
        if self.data.kind == "never_ends":
            await asyncio.sleep(3600)

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return self.data.kind == "stops_at_once"

    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        if self.data.kind == "reward_raises":
            raise ZeroDivisionError("the reward of this example cannot be computed")
        if self.data.kind == "reward_is_nan":
            return float("nan")
        if self.data.kind == "reward_blocks":
            time.sleep(self.data.block_s)
        return float(len(trace.last_reply))

    @vf.reward(weight=0.0)
    async def parts(self, trace: vf.Trace) -> Any:
        return {"half": 0.5, "word": "no number", "both": {"x": 1, "none": None}} if self.data.kind == "measures" else 0

    @vf.metric
    async def more(self, trace: vf.Trace) -> Any:
        return {"more": {"y": 2}} if self.data.kind == "measures" else None

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TrialTaskset(vf.Taskset[TrialTask, TrialConfig]):
    def __init__(self, config: TrialConfig) -> None:
        super().__init__(config)
        self.INFINITE = not config.bounded

    def load(self) -> Iterator[Any]:
        config = self.config
        kinds = [] if config.empty else config.kinds
        for kind in kinds if config.bounded else itertools.cycle(kinds):
            yield TrialTask(TrialData(prompt=f"{kind}?", kind=kind, block_s=config.block_s), config.task)
