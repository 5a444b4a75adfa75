"""Agent loops that others wrote, unmodified, from their first request to the batch: what is sampled is trained once."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_helpers import Recorder, Sample, check_every_token_is_trained_once, recording, report, samples_of
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from anthropic import beta_tool
from gateway_helpers import Gateway, gateway
from primerl.run_key import run_key
from primerl.train.data.batch import decode_batch
from test_orchestrator_in_process import PATIENCE_S, post, publish

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
        # Otherwise the orchestrator's end waits for it.
        post(f"{served.orchestrator.url}/envs/leave", {"worker": served.worker})


def key(rollout: dict[str, Any]) -> str:
    return str(rollout["api_key"])


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


def run_both(
    group: Group, run: Callable[[Model], Any], kind: Callable[..., Model] = OpenAIChatCompletionsModel
) -> list[Any]:
    """Runs it in both rollouts at once."""

    async def rollout(lease: dict[str, Any]) -> Any:
        async with client(lease) as own:
            return await run(kind(model="m", openai_client=own))

    async def both() -> list[Any]:
        return await asyncio.gather(*map(rollout, group.rollouts))

    return asyncio.run(both())


@pytest.mark.parametrize("run", [run_whole, run_streamed])
@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_openai_agents(group: Group, kind: Callable[..., Model], run: Callable[[Model], Any]) -> None:
    assert run_both(group, run, kind) == [[FINAL, "Home again."]] * 2
    assert [len(group.recorder.of(lease)) for lease in group.rollouts] == [4, 4]
    assert [len(samples) for samples in group.samples()] == [1, 1]


def anthropic_client(rollout: dict[str, Any]) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=rollout["base_url"].removesuffix("/v1"), api_key=key(rollout))


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner(group: Group, stream: bool) -> None:
    for rollout in group.rollouts:
        with anthropic_client(rollout) as own:
            runner = own.beta.messages.tool_runner(
                model="m",
                max_tokens=150,
                system=INSTRUCTIONS,
                tools=[beta_tool(get_weather), beta_tool(clock)],
                messages=[{"role": "user", "content": "Where to?"}],
                stream=stream,
            )
            last: Any = runner.until_done()
        assert [block.text for block in last.content if block.type == "text"] == [FINAL]
        assert len(group.recorder.of(rollout)) == 3
    assert [len(samples) for samples in group.samples()] == [1, 1]


def test_an_edited_history_forks_and_its_past_is_trained_once(group: Group) -> None:
    async def run(model: Model) -> None:
        first = await Runner.run(agent(model), "Where to?", run_config=UNTRACED)
        history: list[Any] = [*first.to_input_list(), {"role": "user", "content": "And then?"}]
        outputs = [item for item in history if item.get("type") == "function_call_output"]
        outputs[0]["output"] = "snow in Zürich"
        again = await Runner.run(agent(model), history, run_config=UNTRACED)
        assert again.final_output == "Home again."

    run_both(group, run)
    assert group.gateway.turns()["history_edited"] == 2
    # The second is the edited history with its answer; what it repeats of the first is context there.
    assert [len(samples) for samples in group.samples()] == [2, 2]


def test_a_conversation_that_goes_on_in_two_ways(group: Group) -> None:
    async def run(model: Model) -> None:
        first = await Runner.run(agent(model), "Where to?", run_config=UNTRACED)
        for question in ("And then?", "Is it good?"):
            asked: Any = [*first.to_input_list(), {"role": "user", "content": question}]
            await Runner.run(agent(model), asked, run_config=UNTRACED)

    run_both(group, run)
    assert group.gateway.turns() == {"first_turn": 2, "extended": 8}
    assert [len(samples) for samples in group.samples()] == [2, 2]


@pytest.mark.parametrize("session", ["", "critic"])
def test_another_agent_in_the_same_rollout(group: Group, session: str) -> None:
    """An agent whose tool is an agent: requests of two conversations take turns on one URL, with a name or without."""

    async def run(model: Model) -> None:
        named = ModelSettings(extra_headers={"X-Session-ID": session} if session else None)
        critic = Agent(name="critic", instructions="Judge.", model=model, model_settings=named)

        @function_tool(name_override="get_weather")
        async def ask_the_critic(city: str, days: int) -> str:
            judged = await Runner.run(critic, "Is it good?", run_config=UNTRACED)
            assert judged.final_output == "Rather good."
            return get_weather(city, days)

        planner = Agent(
            name="planner", instructions=INSTRUCTIONS, model=model, tools=[ask_the_critic, function_tool(clock)]
        )
        result = await Runner.run(planner, "Where to?", run_config=UNTRACED)
        assert result.final_output == FINAL

    run_both(group, run)
    # The planner's conversation, and each of the critic's two.
    assert [len(samples) for samples in group.samples(("", session) if session else ("",))] == [3, 3]


class Lossy(httpx.AsyncHTTPTransport):
    """Loses the first answer to each request on its way, as a proxy that gives up does: the SDK tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        if request.headers["x-stainless-retry-count"] != "0":
            return answer
        await answer.aread()
        await answer.aclose()
        assert answer.status_code == 200
        self.lost += 1
        # At once: the SDK would wait for half a second.
        return httpx.Response(502, headers={"retry-after-ms": "1"}, request=request)


@pytest.mark.parametrize("run", [run_whole, run_streamed])
def test_what_is_tried_again_is_sampled_once(group: Group, run: Callable[[Model], Any]) -> None:
    transports = [Lossy(), Lossy()]

    async def rollout(lease: dict[str, Any], transport: Lossy) -> None:
        async with client(lease, http_client=httpx.AsyncClient(transport=transport)) as own:
            answers = await run(OpenAIChatCompletionsModel(model="m", openai_client=own))
        assert answers == [FINAL, "Home again."]

    async def both() -> None:
        await asyncio.gather(*map(rollout, group.rollouts, transports))

    asyncio.run(both())
    assert [transport.lost for transport in transports] == [4, 4]
    assert [len(group.recorder.of(lease)) for lease in group.rollouts] == [4, 4]
    assert [len(samples) for samples in group.samples()] == [1, 1]


def test_the_example_of_the_documentation(mock_binary: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/agents.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    example: dict[str, Any] = {"__name__": "example"}
    exec(compile(code.replace("sums", "task"), "docs/agents.md", "exec"), example)
    answers = []
    for number, (question, right) in enumerate(example["QUESTIONS"]):
        call = json.dumps({"name": "multiply", "arguments": {"a": number, "b": 12}})
        answers.append((question, f"<tool_call>\n{call}\n</tool_call><|im_end|>"))
        answers.append((f"<tool_response>\n{right}\n</tool_response>", f"It is {right}.<|im_end|>"))
    recorder = Recorder()
    sizes = {"batch_size": 4, "group_size": 2, "max_steps": 1}
    before = partial(recording, recorder)
    with gateway(tmp_path, mock_binary, answers=answers, template="qwen3", before=before, **sizes) as served:
        url = served.orchestrator.url
        post(f"{url}/envs/leave", {"worker": served.worker})
        worker = threading.Thread(target=lambda: asyncio.run(example["work"](url, run_key(served.output))))
        worker.start()
        body = served.orchestrator.next_batch(1, 0)
        publish(served.orchestrator, served.output, 1)
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
    step = json.loads((tmp_path / "out/steps.jsonl").read_text())
    assert step["metrics"]["reward/all/mean"] == 1.0
    assert body is not None
    trained = samples_of(decode_batch(body))
    assert len(trained) == 4
    for rollout, samples in trained.items():
        assert len(samples) == 1
        check_every_token_is_trained_once(recorder.of({"rollout": rollout}), samples)
