"""Episodes of two seats: one asks, one answers; by `judged`, the second is an untrainable judge of the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["SeatsEnv", "SeatsTaskset"]


class SeatsConfig(vf.TasksetConfig):
    count: int = 4
    turns: int | None = None


class SeatsData(vf.TaskData):
    number: int
    rollout_limits: dict[str, Any] | None = None


class SeatsTask(vf.Task[SeatsData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3


class SeatsTaskset(vf.Taskset[SeatsTask, SeatsConfig]):
    def load(self) -> Iterator[Any]:
        for number in range(self.config.count):
            limits = {"turns": self.config.turns} if self.config.turns else None
            data = SeatsData(prompt=f"ask {number}", number=number, rollout_limits=limits)
            yield SeatsTask(data, self.config.task)
