"""A taskset that rewrites replies: the in-process turn cannot do that, verifiers' own server has to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["HookedTaskset"]


class HookedTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def shout(self, response: vf.Response) -> vf.Response:
        message = response.message.model_copy(update={"content": (response.message.content or "").upper()})
        return response.model_copy(update={"message": message})

    @vf.reward
    async def shouted(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isupper())


class HookedTaskset(vf.Taskset[HookedTask, vf.TasksetConfig]):
    def load(self) -> Iterator[Any]:
        yield HookedTask(vf.TaskData(prompt="speak"), self.config.task)
