"""Agent loops that others wrote, unmodified, from their first request to the batch: what is sampled is trained once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_helpers import Recorder, Sample, check_every_token_is_trained_once, recording, report, samples_of
from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from gateway_helpers import Gateway, gateway
from primerl.train.data import decode_batch

INSTRUCTIONS = "Plan a trip."
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BERN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}\n</tool_call>'
FINAL = "Go to Zürich at noon."
ANSWERS = [
    ("Where to?", f"<think>\nThe weather decides.\n</think>\n\nI look.\n{WEATHER}\n{CLOCK}<|im_end|>"),
    ("12:00\n</tool_response>", f"<think>\nCompare.\n</think>\n\n{BERN}<|im_end|>"),
    ("rain in Bern\n</tool_response>", f"<think>\nDecided.\n</think>\n\n{FINAL}<|im_end|>"),
    ("And then?", "<think>\nHome.\n</think>\n\nHome again.<|im_end|>"),
    ("Is it good?", "<think>\nHm.\n</think>\n\nRather good.<|im_end|>"),
]


def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: Its name.
        days: How many from today.
    """
    return f"{'sun' if days == 2 else 'rain'} in {city}"


def clock() -> str:
    """The time."""
    return "12:00"


@dataclass
class Group:
    """Both rollouts of the only group of a batch, and what its engine sampled."""

    gateway: Gateway
    recorder: Recorder
    rollouts: list[dict[str, Any]]

    def samples(self, sessions: tuple[str, ...] = ("",)) -> list[list[Sample]]:
        """Reports the rollouts, fetches the batch and compares it with the engine's words. One list a rollout."""
        for reward, rollout in enumerate(self.rollouts):
            report(self.gateway.orchestrator.url, self.gateway.worker, rollout, float(reward), sessions)
        body = self.gateway.orchestrator.next_batch(1, 0)
        assert body is not None
        batch = decode_batch(body)
        samples = samples_of(batch)
        assert set(samples) == {rollout["rollout"] for rollout in self.rollouts}
        trained = sum(len(answer.token_ids) for answer in self.recorder.answers)
        assert batch.loss_tokens == trained == sum(sum(s.trained) for each in samples.values() for s in each)
        for rollout in self.rollouts:
            check_every_token_is_trained_once(self.recorder.of(rollout), samples[rollout["rollout"]])
        return [samples[rollout["rollout"]] for rollout in self.rollouts]


@pytest.fixture
def group(mock_binary: Path, tmp_path: Path) -> Iterator[Group]:
    recorder = Recorder()
    before = partial(recording, recorder)
    sizes = {"batch_size": 2, "group_size": 2}
    with gateway(tmp_path, mock_binary, answers=ANSWERS, template="qwen3", before=before, **sizes) as served:
        rollouts = [served.lease, served.another_rollout()]
        assert rollouts[0]["group"] == rollouts[1]["group"]
        yield Group(served, recorder, rollouts)


def key(rollout: dict[str, Any]) -> str:
    return str(rollout.get("api_key", "unused"))


def client(rollout: dict[str, Any], **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=rollout["base_url"], api_key=key(rollout), **options)


UNTRACED = RunConfig(tracing_disabled=True)


def agent(model: Model) -> Agent[None]:
    tools = [function_tool(get_weather), function_tool(clock)]
    return Agent(name="planner", instructions=INSTRUCTIONS, model=model, tools=list(tools))


async def run_whole(model: Model) -> list[str]:
    """The agent's answers to two questions, the second in the conversation of the first."""
    first = await Runner.run(agent(model), "Where to?", run_config=UNTRACED)
    asked = [*first.to_input_list(), {"role": "user", "content": "And then?"}]
    second = await Runner.run(agent(model), asked, run_config=UNTRACED)  # type: ignore[arg-type]
    return [first.final_output, second.final_output]


async def run_streamed(model: Model) -> list[str]:
    first = Runner.run_streamed(agent(model), "Where to?", run_config=UNTRACED)
    kinds = [event.type async for event in first.stream_events()]
    assert "raw_response_event" in kinds
    asked = [*first.to_input_list(), {"role": "user", "content": "And then?"}]
    second = Runner.run_streamed(agent(model), asked, run_config=UNTRACED)  # type: ignore[arg-type]
    async for _ in second.stream_events():
        pass
    return [first.final_output, second.final_output]


@pytest.mark.parametrize("run", [run_whole, run_streamed])
@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_openai_agents(group: Group, kind: Callable[..., Model], run: Callable[[Model], Any]) -> None:
    async def rollout(lease: dict[str, Any]) -> list[str]:
        async with client(lease) as openai_client:
            return list(await run(kind(model="m", openai_client=openai_client)))

    async def both() -> list[list[str]]:
        return await asyncio.gather(*map(rollout, group.rollouts))

    assert asyncio.run(both()) == [[FINAL, "Home again."]] * 2
    assert [len(group.recorder.of(lease)) for lease in group.rollouts] == [4, 4]
    assert [len(samples) for samples in group.samples()] == [1, 1]
