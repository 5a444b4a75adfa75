"""Episodes of two seats: one asks, the other answers what was asked.

Their rewards lie far apart, so an advantage over both would tell who spoke and not how well. The answering seat is
trained or, with `judged`, a judge that is not. Examples may bring limits of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["SeatsEnv", "SeatsTaskset"]

# What the second seat gets on top.
APART = 1000.0


class SeatsConfig(vf.TasksetConfig):
    count: int = 4
    limits: dict[str, Any] | None = None
    """Of every example."""


class SeatsData(vf.TaskData):
    rollout_limits: dict[str, Any] | None = None


class SeatsTask(vf.Task[SeatsData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        apart = APART if trace.agent.name == "answers" else 0.0
        return apart + float(len(trace.last_reply))


class SeatsTaskset(vf.Taskset[SeatsTask, SeatsConfig]):
    def load(self) -> Iterator[Any]:
        for number in range(self.config.count):
            data = SeatsData(prompt=f"Ask me number {number}.", rollout_limits=self.config.limits)
            yield SeatsTask(data, self.config.task)


class SeatsEnvConfig(vf.EnvConfig):
    asks: vf.AgentConfig = vf.AgentConfig()
    answers: vf.AgentConfig = vf.AgentConfig()
    judged: bool = False


class SeatsEnv(vf.Env[SeatsEnvConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.answers.trainable = not self.config.judged

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        asked = await agents.asks.run(task)
        await agents.answers.run(task.with_data(prompt=f"Answer: {asked.last_reply or 'nothing'}"))
