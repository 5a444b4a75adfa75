"""Tools and reasoning over the chat dialect: what is parsed, what comes back, and that it extends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from gateway_helpers import Gateway, gateway
from render_helpers import TOOLS

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
ANSWERS = [
    ("Weather?", f"<think>\nI need the weather.\n</think>\n\nI look.\n{CALL}\n{SECOND}<|im_end|>"),
    ("12:00\n</tool_response>", "<think>\nSunny, then.\n</think>\n\nSun at noon.<|im_end|>"),
    ("And tomorrow?", "<think>\nNo idea.\n</think>\n\nRain.<|im_end|>"),
    ("Broken", 'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call><|im_end|>'),
]


@pytest.fixture(scope="module")
def served(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), mock_binary, answers=ANSWERS, template="qwen3") as served:
        yield served


def client(served: Gateway) -> openai.OpenAI:
    rollout = served.another_rollout()
    return openai.OpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"])


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, tools=TOOLS, **options)  # type: ignore[call-overload]


def check_calls(message: Any) -> None:
    assert message.content == "I look."
    assert message.reasoning_content == "I need the weather."
    calls = message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "clock"]
    assert json.loads(calls[0].function.arguments) == {"city": "Zürich", "days": 2}
    assert len({call.id for call in calls}) == 2


def results(calls: Any) -> list[dict[str, Any]]:
    texts = ["sunny", "12:00"]
    return [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]


@pytest.mark.parametrize("echo", ["as it came", "without reasoning", "reserialised", "reasoning in the content"])
def test_a_tool_conversation_extends(served: Gateway, echo: str) -> None:
    with client(served) as agent:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        answer = ask(agent, messages).choices[0]
        assert answer.finish_reason == "tool_calls"
        check_calls(answer.message)
        echoed = answer.message.model_dump(exclude_none=True)
        if echo != "as it came":
            reasoning = echoed.pop("reasoning_content")
        if echo == "reserialised":
            for call in echoed["tool_calls"]:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        if echo == "reasoning in the content":
            echoed["content"] = f"<think>{reasoning}</think>{echoed['content']}\n"
        before = served.turns()
        messages += [echoed, *results(answer.message.tool_calls)]
        final = ask(agent, messages).choices[0].message
        assert (final.content, final.reasoning_content) == ("Sun at noon.", "Sunny, then.")
        messages += [final.model_dump(exclude_none=True), {"role": "user", "content": "And tomorrow?"}]
        assert ask(agent, messages).choices[0].message.content == "Rain."
        after = served.turns()
        assert after["extended"] - before.get("extended", 0) == 2, (before, after)


def test_streamed_calls_are_those_of_the_whole_answer(served: Gateway) -> None:
    with client(served) as agent:
        whole = ask(agent, [{"role": "user", "content": "Weather?"}]).choices[0].message
        stream = ask(agent, [{"role": "user", "content": "Weather?"}], stream=True)
        content, reasoning, calls = "", "", []
        for chunk in stream:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            calls += delta.tool_calls or []
        assert (content, reasoning) == (whole.content, whole.reasoning_content)
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            (call.function.name, call.function.arguments) for call in whole.tool_calls
        ]
        assert [call.index for call in calls] == [0, 1]


def test_one_call_where_only_one_is_wanted(served: Gateway) -> None:
    with client(served) as agent:
        message = ask(agent, [{"role": "user", "content": "Weather?"}], parallel_tool_calls=False).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["get_weather"]


def test_a_malformed_call_is_text_with_a_flag(served: Gateway) -> None:
    with client(served) as agent:
        choice = ask(agent, [{"role": "user", "content": "Broken"}]).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == ANSWERS[-1][1].removesuffix("<|im_end|>")
        assert choice.message.malformed_tool_calls


def test_an_edited_answer_forks(served: Gateway) -> None:
    with client(served) as agent:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        message = ask(agent, messages).choices[0].message.model_dump(exclude_none=True)
        message["tool_calls"][0]["function"]["arguments"] = '{"city": "Bern"}'
        before = served.turns().get("answer_edited", 0)
        ask(agent, [*messages, message, {"role": "tool", "tool_call_id": "x", "content": "?"}], max_tokens=5)
        assert served.turns()["answer_edited"] == before + 1


def test_anthropics_sdk_goes_through_the_same_conversation(served: Gateway) -> None:
    rollout = served.another_rollout()
    base_url = rollout["base_url"].removesuffix("/v1")
    tools: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    with anthropic.Anthropic(base_url=base_url, api_key=rollout["api_key"]) as agent:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        before = served.turns().get("extended", 0)
        with agent.messages.stream(model="m", max_tokens=150, messages=messages, tools=tools) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert calls[0].input == {"city": "Zürich", "days": 2}
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text}
            for call, text in zip(calls, ["sunny", "12:00"], strict=True)
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        final = agent.messages.create(model="m", max_tokens=150, messages=messages, tools=tools)
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[-1].text == "Sun at noon."  # type: ignore[union-attr]
        assert served.turns()["extended"] == before + 1


@pytest.mark.parametrize("stored", [True, False])
def test_responses_go_through_the_same_conversation(served: Gateway, stored: bool) -> None:
    tools: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    with client(served) as agent:
        before = served.turns().get("extended", 0)
        first = agent.responses.create(model="m", input="Weather?", tools=tools)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        calls = [item for item in first.output if item.type == "function_call"]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": text}
            for call, text in zip(calls, ["sunny", "12:00"], strict=True)
        ]
        if stored:
            final = agent.responses.create(model="m", input=results, tools=tools, previous_response_id=first.id)
        else:
            items: list[Any] = [{"role": "user", "content": "Weather?"}, *first.output, *results]
            final = agent.responses.create(model="m", input=items, tools=tools)
        assert final.output_text == "Sun at noon."
        assert served.turns()["extended"] == before + 1


def test_streamed_responses_carry_calls(served: Gateway) -> None:
    tools: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    with client(served) as agent, agent.responses.stream(model="m", input="Weather?", tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert "response.reasoning_text.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
