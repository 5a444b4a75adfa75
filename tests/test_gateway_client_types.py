"""Engines that render messages themselves, and evaluations of other servers, as agents with their own SDKs see them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import render_helpers
from engine_helpers import Engine, mock_command, running, wait_until
from gateway_helpers import QWEN_PROMPT_END, Gateway, gateway, lease, scripted
from primerl._core import Orchestrator, PrimerlError
from primerl.render import Renderer
from render_helpers import TOOLS
from test_orchestrator_in_process import begin, post, publish, settings

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
ANSWERS = [
    ("Hello", "Hi there, how are you?<|im_end|>"),
    ("Again", "Once more.<|im_end|>"),
    ("Weather?", f"I look.\n{CALL}<|im_end|>"),
    ("sunny\n</tool_response>", "Sun.<|im_end|>"),
    ("Think", "<think>\nHm.\n</think>\n\nYes.<|im_end|>"),
]


def rendered(folder: Path, mock_binary: Path, template: str, *flags: str) -> contextlib.AbstractContextManager[Gateway]:
    return gateway(
        folder,
        mock_binary,
        answers=ANSWERS,
        template=template,
        flags=("--chat-model", str(folder / "model"), *flags),
        client_type="openai_chat_completions_token",
    )


@pytest.fixture(scope="module")
def served(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with rendered(tmp_path_factory.mktemp("gateway"), mock_binary, "qwen2_5") as served:
        yield served


def client(rollout: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"])


def ask(agent: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    extra = {"return_token_ids": True}
    return agent.chat.completions.create(model="m", messages=messages, extra_body=extra, **options)  # type: ignore[call-overload]


def prompt_of(answer: Any) -> list[int]:
    return list(answer.model_extra["prompt_token_ids"])


def sampled_of(answer: Any) -> list[int]:
    return list(answer.choices[0].model_extra["token_ids"])


# Engines that render ------------------------------------------------------------------------------------------------


def test_a_conversation_extends_what_the_engine_renders(served: Gateway) -> None:
    with client(served.another_rollout()) as agent:
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        first = ask(agent, messages)
        assert first.choices[0].message.content == "Hi there, how are you?"
        assert prompt_of(first) == served.renderer.render(messages)
        before = served.turns().get("extended", 0)
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Again"}]
        second = ask(agent, messages)
        assert second.choices[0].message.content == "Once more."
        recorded = prompt_of(first) + sampled_of(first)
        assert prompt_of(second)[: len(recorded)] == recorded
        assert served.turns()["extended"] == before + 1


def test_tools_are_rendered_by_the_engine_and_parsed_here(served: Gateway) -> None:
    with client(served.another_rollout()) as agent:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        answer = ask(agent, messages, tools=TOOLS)
        assert prompt_of(answer) == served.renderer.render(messages, tools=TOOLS)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [call.function.name for call in message.tool_calls] == ["get_weather"]
        before = served.turns().get("extended", 0)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        messages += [message.model_dump(exclude_none=True), result]
        assert ask(agent, messages, tools=TOOLS).choices[0].message.content == "Sun."
        assert served.turns()["extended"] == before + 1


def test_a_template_that_drops_thinking_forks_with_the_reason(mock_binary: Path, tmp_path: Path) -> None:
    with rendered(tmp_path, mock_binary, "qwen3") as served, client(served.lease) as agent:
        messages: list[Any] = [{"role": "user", "content": "Think"}]
        first = ask(agent, messages)
        assert first.choices[0].message.model_extra["reasoning_content"] == "Hm."
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Again"}]
        second = ask(agent, messages)
        # What the engine was given, not what we would have given it.
        assert prompt_of(second) == served.renderer.render(messages)
        assert served.turns() == {"first_turn": 1, "prefix_differs": 1}


def test_streams_stops_and_alternatives(served: Gateway) -> None:
    with client(served.another_rollout()) as agent:
        messages = [{"role": "user", "content": "Hello"}]
        stream = ask(agent, messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hi there, how are you?"
        stopped = ask(agent, messages, stop=["how"]).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == ("Hi there, ", "stop")
        choice = ask(agent, messages, logprobs=True, top_logprobs=2).choices[0]
        for entry in choice.logprobs.content:
            assert [top.logprob for top in entry.top_logprobs] == sorted(
                (top.logprob for top in entry.top_logprobs), reverse=True
            )
            assert len(entry.top_logprobs) == 2
        both = ask(agent, messages, n=2)
        assert [choice.message.content for choice in both.choices] == ["Hi there, how are you?"] * 2


def test_anthropics_and_openais_other_dialects(served: Gateway) -> None:
    rollout = served.another_rollout()
    root = str(rollout["base_url"]).removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=rollout["api_key"]) as claude:
        question: Any = [{"role": "user", "content": "Hello"}]
        (block,) = claude.messages.create(model="m", max_tokens=50, messages=question).content
        assert block.text == "Hi there, how are you?"  # type: ignore[union-attr]
    with client(rollout) as agent:
        response = agent.responses.create(model="m", input="Hello")
        assert response.output_text == "Hi there, how are you?"
        following = agent.responses.create(model="m", input="Again", previous_response_id=response.id)
        assert following.output_text == "Once more."


def test_what_only_a_renderer_here_can_do_is_refused(served: Gateway) -> None:
    with client(served.another_rollout()) as agent:
        with pytest.raises(openai.BadRequestError, match="accepts messages only, not a prompt of text"):
            agent.completions.create(model="m", prompt="Hello")
        with pytest.raises(openai.BadRequestError, match="documents") as refused:
            agent.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a"}], extra_body={"documents": [{"text": "b"}]}
            )
        assert refused.value.param == "documents"
        with pytest.raises(openai.BadRequestError) as refused:
            ask(agent, [{"role": "user", "content": "word " * 2000}])
        assert refused.value.code == "context_length_exceeded"


def test_retries_get_the_same_answer(served: Gateway) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Something random"}]}

    def content(**headers: str) -> str:
        answer = served.post("chat/completions", body, **headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    first = content()
    assert content(x_stainless_retry_count="1") == first
    assert content() != first


def test_a_client_that_hangs_up_ends_the_engines_request(mock_binary: Path, tmp_path: Path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Something long"}]}).encode()
    # Minutes for 200 tokens: it does not end by itself.
    slow = ("--eos-probability", "0", "--token-latency-ms", "300")
    with rendered(tmp_path, mock_binary, "qwen2_5", *slow) as served:
        url = httpx.URL(served.base_url)
        engine = served.orchestrator.status()["engines"][0]["url"]

        def load() -> int:
            return int(httpx.get(f"{engine}/load", timeout=60).json()["server_load"])

        with socket.create_connection((url.host, int(url.port or 0))) as connection:
            head = (
                f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.host}\r\n"
                f"Authorization: Bearer {served.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            wait_until(lambda: load() == 1, "the request's start")
        wait_until(lambda: load() == 0, "the request's end")


# Evaluations of other servers ---------------------------------------------------------------------------------------


@dataclass
class Measured:
    """A run whose evaluation asks a second engine, which is not the run's, over its chat route."""

    orchestrator: Orchestrator
    output: Path
    worker: int
    other: Engine

    def lease(self) -> dict[str, Any]:
        return lease(self.orchestrator.url, self.worker)

    def report(self, rollout: dict[str, Any], reward: float) -> None:
        trace = {"session": "", "trainable": True, "ok": True, "reward": reward, "metrics": {}}
        outcome = {"ok": True, "traces": [{**trace, "stop_condition": None, "truncated": False}], "error": None}
        body = {"worker": self.worker, "rollout": rollout["rollout"], "outcome": outcome}
        post(f"{self.orchestrator.url}/envs/result", body)

    def evaluations(self) -> list[dict[str, Any]]:
        file = self.output / "evals.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def measured(mock_binary: Path, tmp_path: Path) -> Iterator[Measured]:
    model = render_helpers.write_qwen(tmp_path / "model", render_helpers.trl_template("qwen2_5"))
    script = tmp_path / "script.json"
    script.write_text(json.dumps(scripted(Renderer(model), ANSWERS, QWEN_PROMPT_END)))
    flags = ["--vocab-size", "2000", "--last-token", "250", "--script", str(script), "--chat-model", str(model)]
    output = tmp_path / "out"
    with (
        running("mock", mock_command(mock_binary), None, tmp_path / "engine.log") as engine,
        running("mock", mock_command(mock_binary, *flags), None, tmp_path / "other.log") as other,
    ):
        baseline = {"base_url": f"{other.url}/v1", "model": "m", "timeout_s": 30.0}
        environment = {"id": "task", "name": "baseline", "num_examples": 2, "client": baseline}
        changes: dict[str, Any] = {"sampling": {"max_tokens": 100}, "eval": {"env": [environment]}}
        with Orchestrator(settings(model, output, engines=[engine.url], **changes)) as orchestrator:
            begin(orchestrator, output)
            publish(orchestrator, output, 0)
            registration = {"environment": "baseline", "role": "eval", "name": "w", "pid": 1, "examples": 10}
            worker = post(f"{orchestrator.url}/envs/register", registration)["worker"]
            yield Measured(orchestrator, output, worker, other)


def test_an_evaluation_asks_another_server_in_every_dialect(measured: Measured) -> None:
    rollout = measured.lease()
    root = str(rollout["base_url"]).removesuffix("/v1")
    with client(rollout) as agent:
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        answer = agent.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].message.content == "Hi there, how are you?"
        usage = answer.usage
        assert usage is not None
        assert min(usage.prompt_tokens, usage.completion_tokens) > 5
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Again"}]
        assert agent.chat.completions.create(model="m", messages=messages).choices[0].message.content == "Once more."
        chunks = list(agent.chat.completions.create(model="m", messages=messages[:1], stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi there, how are you?"
        called = agent.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Weather?"}],
            tools=TOOLS,  # type: ignore[arg-type]
            stream=True,
        )
        calls = [call for chunk in called for call in chunk.choices[0].delta.tool_calls or []]
        assert calls[0].function is not None
        assert calls[0].function.name == "get_weather"
        assert json.loads(calls[0].function.arguments or "") == {"city": "Bern", "days": 2}
        assert agent.responses.create(model="m", input="Hello").output_text == "Hi there, how are you?"
        with pytest.raises(openai.BadRequestError, match="accepts messages only, not a prompt of text"):
            agent.completions.create(model="m", prompt="Hello")
        with pytest.raises(openai.BadRequestError) as refused:
            agent.chat.completions.create(model="m", messages=messages[:1], logprobs=True)
        assert refused.value.param == "logprobs"
    with anthropic.Anthropic(base_url=root, api_key=rollout["api_key"]) as claude:
        question: Any = [{"role": "user", "content": "Hello"}]
        whole = claude.messages.create(model="m", max_tokens=50, messages=question)
        assert whole.content[0].text == "Hi there, how are you?"  # type: ignore[union-attr]
        assert whole.usage.output_tokens == usage.completion_tokens
        with claude.messages.stream(model="m", max_tokens=50, messages=question) as stream:
            assert stream.get_final_text() == "Hi there, how are you?"


def test_the_result_says_which_model_was_measured(measured: Measured) -> None:
    for reward in (1.0, 0.0):
        rollout = measured.lease()
        with client(rollout) as agent:
            agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
        measured.report(rollout, reward)
    wait_until(lambda: bool(measured.evaluations()), "the evaluation's end")
    (line,) = measured.evaluations()
    assert (line["environment"], line["model"], line["mean_reward"]) == ("baseline", "m", 0.5)
    assert "version" not in line
    assert line["policy_at_the_time"] == 0


def test_the_other_servers_refusals_and_retries_are_told(measured: Measured) -> None:
    rollout = measured.lease()
    with client(rollout) as agent:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
            agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 2000}])
        first = agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Random"}])
    headers = {"authorization": f"Bearer {rollout['api_key']}", "x-stainless-retry-count": "1"}
    body = first_body = {"model": "m", "messages": [{"role": "user", "content": "Other"}]}
    url = f"{rollout['base_url']}/chat/completions"
    answers = [httpx.post(url, json=body, headers=headers, timeout=30).json() for body in (first_body, body)]
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert contents[0] == contents[1] != first.choices[0].message.content


def test_a_missing_key_is_named_before_anything_starts(tmp_path: Path) -> None:
    model = render_helpers.write_qwen(tmp_path / "model", render_helpers.trl_template("qwen2_5"))
    baseline = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "PRIMERL_TEST_NO_SUCH_KEY"}
    evaluation = {"env": [{"id": "task", "name": "baseline", "client": baseline}]}
    orchestrator = Orchestrator(settings(model, tmp_path / "out", eval=evaluation))
    with pytest.raises(PrimerlError, match=r"eval\.env\.baseline\.client\.api_key_env: names PRIMERL_TEST_NO_SUCH_KEY"):
        orchestrator.start()
    assert not (tmp_path / "out").exists()
