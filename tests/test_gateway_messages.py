"""The messages dialect as Anthropic's own SDK speaks it, and the counts that belong to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import render_helpers
from anthropic.types import Message, RawMessageStreamEvent
from gateway_helpers import Gateway, gateway
from primerl.run_key import run_key
from pydantic import TypeAdapter
from test_orchestrator_in_process import PATIENCE_S, post

HELLO = "Hi there, how are you?"
ANSWERS = [
    ("Hello", f"{HELLO}<|im_end|>"),
    ("Emoji", "👩‍👩‍👧 é ü<|im_end|>"),
    ("Again", "Once more.<|im_end|>"),
    ("Nothing", "<|im_end|>"),
    ("42\n</tool_response>", "It is 42.<|im_end|>"),
]
TOOL = {
    "name": "calculate",
    "description": "Computes",
    "input_schema": {"type": "object", "properties": {"what": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "calculate", "input": {"what": "6 * 7"}}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def served(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), mock_binary, answers=ANSWERS) as served:
        yield served


@pytest.fixture
def client(served: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.root_url, api_key=served.api_key) as client:
        yield client


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def ask(words: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": [user(words)], **fields}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def events_of(body: str) -> list[dict[str, Any]]:
    """Data of the events, each with its own name, without comments."""
    events = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_whole(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**ask("Hello"))
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": HELLO}]
    assert answer.stop_reason == "end_turn"
    assert answer.model == "m"
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 0


def test_asynchronous(served: Gateway) -> None:
    async def both() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=served.root_url, api_key=served.api_key) as client:
            whole = await client.messages.create(**ask("Hello"))
            async with client.messages.stream(**ask("Emoji")) as stream:
                streamed = "".join([text async for text in stream.text_stream])
            return text_of(whole), streamed

    assert asyncio.run(both()) == (HELLO, "👩‍👩‍👧 é ü")


def test_streamed(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(**ask("Hello"), stream=True))
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    with client.messages.stream(**ask("Hello")) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == text_of(final) == HELLO
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0


@pytest.mark.parametrize("words", ["Hello", "Nothing"])
def test_bodies_are_what_the_sdk_declares(served: Gateway, words: str) -> None:
    whole = served.post("messages", ask(words), anthropic_version="2023-06-01", anthropic_beta="some-beta").json()
    message = Message.model_validate(whole)
    assert [block.type for block in message.content] == (["text"] if words == "Hello" else [])
    streamed = served.post("messages", ask(words, stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed.text)
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    assert events[0]["message"]["content"] == []
    assert events[-2]["usage"] == whole["usage"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert len(starts) == len(message.content)


def test_limits_and_stop_sequences(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(**ask("Hello", max_tokens=2))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = client.messages.create(**ask("Hello", stop_sequences=["zz", "how"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "how")
    assert text_of(stopped) == "Hi there, "
    with client.messages.stream(**ask("Hello", stop_sequences=["how"])) as stream:
        assert "".join(stream.text_stream) == "Hi there, "
        assert stream.get_final_message().stop_sequence == "how"


def test_a_conversation_extends_with_the_sdks_own_blocks(served: Gateway) -> None:
    rollout = served.another_rollout()
    root = rollout["base_url"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=rollout["api_key"]) as client:
        fields: dict[str, Any] = {
            "system": [{"type": "text", "text": "Be kind.", "cache_control": None}],
            "tools": [TOOL],
        }
        before = served.turns().get("extended", 0)
        first = client.messages.create(**ask("Hello", **fields))
        messages = [user("Hello"), {"role": "assistant", "content": first.content}, user("Again")]
        counted = client.messages.count_tokens(model="m", messages=messages, **fields)
        with client.messages.stream(model="m", max_tokens=50, messages=messages, **fields) as stream:
            second = stream.get_final_message()
        assert text_of(second) == "Once more."
        assert served.turns()["extended"] == before + 1
        assert counted.input_tokens == second.usage.input_tokens
        # The same answer in other shapes: as text, as a dump with its nulls.
        for content in (text_of(first), [block.model_dump() for block in first.content]):
            messages[1] = {"role": "assistant", "content": content}
            messages[2:] = [user([{"type": "text", "text": "Again"}])]
            client.messages.create(model="m", max_tokens=50, messages=messages, **fields)
        messages += [{"role": "assistant", "content": second.content}, user("Hello")]
        client.messages.create(model="m", max_tokens=50, messages=messages, **fields)
        assert served.turns()["extended"] == before + 4


def test_an_empty_answer_is_extended(served: Gateway) -> None:
    rollout = served.another_rollout()
    root = rollout["base_url"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=rollout["api_key"]) as client:
        before = served.turns().get("extended", 0)
        first = client.messages.create(**ask("Nothing"))
        assert first.content == []
        messages = [user("Nothing"), {"role": "assistant", "content": first.content}, user("Again")]
        assert text_of(client.messages.create(model="m", max_tokens=50, messages=messages)) == "Once more."
        assert served.turns()["extended"] == before + 1


def test_histories_with_tools_and_thinking(served: Gateway, client: anthropic.Anthropic) -> None:
    thinking = {"type": "thinking", "thinking": "Six times seven.", "signature": "signed"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "42"}]}
    history: list[Any] = [
        user("What is 6 * 7?"),
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "I compute."}, CALL]},
        user([result]),
    ]
    request: dict[str, Any] = {"model": "m", "messages": history, "tools": [TOOL], "system": "Be exact."}
    counted = client.messages.count_tokens(**request)
    answer = client.messages.create(max_tokens=50, **request)
    assert text_of(answer) == "It is 42."
    function = {"name": "calculate", "arguments": CALL["input"]}
    rendered = served.renderer.render(
        [
            {"role": "system", "content": "Be exact."},
            user("What is 6 * 7?"),
            {
                "role": "assistant",
                "content": "I compute.",
                "reasoning_content": "Six times seven.",
                "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "name": "calculate", "content": "42"},
        ],
        [
            {
                "type": "function",
                "function": {"name": "calculate", "description": "Computes", "parameters": TOOL["input_schema"]},
            }
        ],
    )
    assert answer.usage.input_tokens == counted.input_tokens == len(rendered)
    history[2]["content"] += [{"type": "text", "text": "Again"}]
    assert text_of(client.messages.create(max_tokens=50, **request)) == "Once more."


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"temperature": 0.5}, "temperature"),
        ({"container": "c"}, "container"),
        ({"tool_choice": {"type": "always"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"messages": [user([{"type": "image", "source": {"type": "url", "url": "u"}}])]}, "messages.0.content.0.type"),
        ({"messages": [user("Hello"), {"role": "assistant", "content": "Hi"}]}, "messages"),
        ({"mystery": 1}, "mystery"),
    ],
)
def test_refusals_name_the_field(client: anthropic.Anthropic, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        # The SDK's signature leaves out some fields of the API.
        client.messages.create(**ask("Hello"), extra_body=fields)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == named
    assert named in body["error"]["message"]


def test_a_missing_limit_is_refused_and_harmless_fields_pass(served: Gateway) -> None:
    request = ask("Hello")
    del request["max_tokens"]
    refused = served.post("messages", request)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    harmless = {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "top_k": 0}
    answered = served.post("messages?beta=true", ask("Hello", **harmless))
    assert answered.status_code == 200, answered.text


def test_a_long_prompt_is_anthropics_error(served: Gateway, client: anthropic.Anthropic) -> None:
    for stream in (False, True):
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1000 maximum"
        ) as refused:
            client.messages.create(**ask("word " * 1000), stream=stream)
        body: Any = refused.value.body
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["code"] == "context_length_exceeded"
    # It can be counted all the same.
    counted = client.messages.count_tokens(model="m", messages=[user("word " * 1000)])
    assert counted.input_tokens > 512


def test_rollouts_that_are_not_there(served: Gateway) -> None:
    root = served.root_url.rsplit("/", 1)[0] + "/999999"
    # Whoever has no key to it does not learn whether it is there.
    with anthropic.Anthropic(base_url=root, api_key=served.api_key) as client:
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**ask("Hello"))
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.count_tokens(model="m", messages=[user("Hello")])


def test_a_rollout_that_is_over_is_gone(served: Gateway) -> None:
    rollout = served.another_rollout()
    outcome = {"ok": False, "traces": [], "error": {"kind": "e", "message": "m"}}
    result = {"worker": served.worker, "rollout": rollout["rollout"], "outcome": outcome}
    post(f"{served.orchestrator.url}/envs/result", result)
    root = rollout["base_url"].removesuffix("/v1")
    with (
        anthropic.Anthropic(base_url=root, api_key=rollout["api_key"]) as client,
        pytest.raises(anthropic.APIStatusError) as gone,
    ):
        client.messages.create(**ask("Hello"))
    body: Any = gone.value.body
    assert gone.value.status_code == 410
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "rollout_over")


def test_retries_get_the_same_answer_and_repeats_another(served: Gateway) -> None:
    def answered(**headers: str) -> list[Any]:
        answer = served.post("messages", ask("Something random"), **headers)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["content"])

    first = answered()
    assert answered(x_stainless_retry_count="1") == first
    assert answered() != first
    retried = served.post("messages", ask("Something random", stream=True), x_stainless_retry_count="1")
    assert retried.status_code == 200


def test_counts_without_a_rollout(served: Gateway) -> None:
    key = run_key(served.output)
    with anthropic.Anthropic(base_url=served.orchestrator.url, api_key=key) as client:
        counted = client.messages.count_tokens(model="m", system="Be kind.", messages=[user("Hello")])
        assert counted.input_tokens == len(
            served.renderer.render([{"role": "system", "content": "Be kind."}, user("Hello")])
        )
        with pytest.raises(anthropic.BadRequestError):
            client.messages.count_tokens(model="m", messages=[])


def tokens(served: Gateway, url: str, **body: Any) -> Any:
    # A rollout's key opens what is below its own address.
    key = served.api_key if url.startswith(served.root_url) else run_key(served.output)
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tokenize_and_detokenize(served: Gateway) -> None:
    text = "Hello é 👩<|im_end|>"
    ids = served.renderer.encode(text)
    for base in (served.base_url, served.root_url, f"{served.orchestrator.url}/v1", served.orchestrator.url):
        plain = tokens(served, f"{base}/tokenize", model="m", prompt=text)
        assert plain == {"count": len(ids), "max_model_len": 1000, "tokens": ids, "token_strs": None}
        assert tokens(served, f"{base}/detokenize", tokens=ids) == {"prompt": text}
    shown = tokens(served, f"{served.base_url}/tokenize", prompt="Hello<|im_end|>", return_token_strs=True)
    assert "".join(shown["token_strs"]) == "Hello<|im_end|>"
    for arguments in ({}, {"add_generation_prompt": False}, {"tools": render_helpers.TOOLS}):
        rendered = served.renderer.render([user("Hello")], **arguments)  # type: ignore[arg-type]
        assert (
            tokens(served, f"{served.base_url}/tokenize", messages=[user("Hello")], **arguments)["tokens"] == rendered
        )


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [user("a")]}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [user("a")], "chat_template": "x"}, "chat_template"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [10**7]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(served: Gateway, path: str, body: dict[str, Any], named: str) -> None:
    refused = served.post(path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)
