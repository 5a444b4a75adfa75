"""The taskset, and the environment whose scripted user speaks in every turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

from sort_letters.letters import examples, gold, message, score


class SortConfig(vf.TasksetConfig):
    split: Literal["train", "eval"] = "train"
    """The splits share no example, whatever their seeds."""
    num_examples: int = Field(1024, ge=1)
    """Examples drawn."""
    seed: int = 0
    """Seed of the draw."""
    min_turns: int = Field(2, ge=1, le=6)
    """Fewest user turns."""
    max_turns: int = Field(3, ge=1, le=6)
    """Most user turns."""

    @model_validator(mode="after")
    def _turns_are_ordered(self) -> SortConfig:
        if self.min_turns > self.max_turns:
            raise ValueError(f"min_turns ({self.min_turns}) is above max_turns ({self.max_turns})")
        return self


class SortData(vf.TaskData):
    turns: list[str]
    """New letters of each turn."""


class SortTask(vf.Task[SortData]):
    @property
    def key(self) -> str:
        return "/".join(self.data.turns)

    def _replies(self, trace: vf.Trace) -> list[str]:
        return [reply.content or "" for reply in trace.assistant_messages]

    @vf.reward
    async def sorted_letters(self, trace: vf.Trace) -> float:
        """Mean over the planned turns; a turn that was not reached earns nothing."""
        turns, replies = self.data.turns, self._replies(trace)
        return sum(score(reply, gold(turns, turn)) for turn, reply in enumerate(replies[: len(turns)])) / len(turns)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        turns = self.data.turns
        return float(self._replies(trace) == [gold(turns, turn) for turn in range(len(turns))])


class SortTaskset(vf.Taskset[SortTask, SortConfig]):
    def load(self) -> Iterator[SortTask]:
        config = self.config
        drawn = examples(config.split, config.seed, config.min_turns, config.max_turns)
        for turns in itertools.islice(drawn, config.num_examples):
            yield SortTask(SortData(turns=list(turns)), config.task)


class SortEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy."""


class SortEnv(vf.Env[SortEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        assert isinstance(task, SortTask)
        async with agents.agent.interaction(task) as conversation:
            for turn in range(len(task.data.turns)):
                segment = await conversation.turn(message(task.data.turns, turn))
                if segment.terminated:
                    break
