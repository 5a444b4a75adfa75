"""A taskset with a tool, served by a process of its own for each rollout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Words(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def reverse(self, text: str) -> str:
        """Reverse a text."""
        return text[::-1]


class ToolTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Words(vf.ToolsetConfig())]

    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float(any("cba" in str(message.content) for message in trace.tool_messages))


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self) -> Iterator[Any]:
        yield ToolTask(vf.TaskData(prompt="reverse abc"), self.config.task)


if __name__ == "__main__":
    Words.run()
