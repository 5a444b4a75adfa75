"""The responses dialect as OpenAI's own SDK speaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_helpers import Gateway, gateway
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_orchestrator_in_process import PATIENCE_S

HELLO = "Hi there, how are you?"
ANSWERS = [("Hello", f"{HELLO}<|im_end|>"), ("Again", "Once more.<|im_end|>"), ("Thrice", "And again.<|im_end|>")]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


@pytest.fixture(scope="module")
def served(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    tool_answer = ("<tool_response>\n21\n</tool_response>", "It is 21 degrees.<|im_end|>")
    with gateway(tmp_path_factory.mktemp("gateway"), mock_binary, answers=[*ANSWERS, tool_answer]) as served:
        yield served


@pytest.fixture
def client(served: Gateway, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """With a conversation of its own."""
    session = {"X-Session-ID": request.node.name}
    with openai.OpenAI(
        base_url=served.base_url, api_key=served.api_key, max_retries=0, default_headers=session
    ) as client:
        yield client


def extended(served: Gateway) -> int:
    return served.turns().get("extended", 0)


def posted(client: openai.OpenAI, **body: Any) -> httpx.Response:
    session = str(client.default_headers["X-Session-ID"])
    headers = {"X-Session-ID": session, "Authorization": f"Bearer {client.api_key}"}
    url = f"{client.base_url}responses"
    answer = httpx.post(url, json={"model": "m", **body}, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


def test_whole(client: openai.OpenAI) -> None:
    body = posted(client, input="Hello", metadata={"a": "b"}, tools=[WEATHER], instructions="Be kind.").json()
    answer = Response.model_validate(body, strict=True)
    assert answer.output_text == HELLO
    assert (answer.status, answer.metadata, answer.instructions) == ("completed", {"a": "b"}, "Be kind.")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    # OpenAI's server sends `store` too.
    assert set(body) - set(Response.model_fields) == {"store"}


def test_cut_off(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="m", input="Hello", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"  # type: ignore[union-attr]


def test_streamed(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="m", input="Hello", stream=True)
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text_deltas = kinds.count("output_text.delta")
    assert text_deltas > 1
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*before, *["output_text.delta"] * text_deltas, *after]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == HELLO
    assert client.responses.retrieve(last.response.id).output_text == HELLO


def test_each_event_is_of_its_type(client: openai.OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    lines = posted(client, input="Hello", stream=True, include=include, top_logprobs=2, tools=[WEATHER]).text
    data = [json.loads(line.removeprefix("data: ")) for line in lines.splitlines() if line.startswith("data: ")]
    for event in data:
        typed = EVENTS.validate_python(event, strict=True)
        assert typed.type == event["type"]
        assert set(event) <= set(type(typed).model_fields)
    done = next(event for event in data if event["type"] == "response.output_text.done")
    assert "".join(token["token"] for token in done["logprobs"]).startswith(HELLO)
    deltas = [event for event in data if event["type"] == "response.output_text.delta"]
    assert all(len(token["top_logprobs"]) == 2 for event in deltas for token in event["logprobs"])


def test_the_sdks_own_accumulation(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="Hello") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == HELLO
    assert final.output_text == HELLO


def test_asynchronous(client: openai.OpenAI) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as other:
            whole = await other.responses.create(model="m", input="Hello")
            stream = await other.responses.create(model="m", input="Hello", stream=True)
            text = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return whole.output_text, "".join(text)

    assert asyncio.run(ask()) == (HELLO, HELLO)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = posted(client, input="Hello", include=["message.output_text.logprobs"], top_logprobs=2).json()
    tokens = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in tokens) == f"{HELLO}<|im_end|>"
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    Response.model_validate(answer, strict=True)


def test_a_conversation_extends_over_previous_responses(served: Gateway, client: openai.OpenAI) -> None:
    before = extended(served)
    first = client.responses.create(model="m", input="Hello", instructions="Be kind.")
    second = client.responses.create(
        model="m", input="Again", instructions="Be kind.", previous_response_id=first.id, stream=True
    )
    completed = list(second)[-1]
    assert completed.type == "response.completed"
    assert completed.response.output_text == "Once more."
    assert extended(served) == before + 1
    last = client.responses.create(
        model="m", input="Thrice", instructions="Be kind.", previous_response_id=completed.response.id
    )
    assert last.output_text == "And again."
    assert last.previous_response_id == completed.response.id
    assert extended(served) == before + 2
    # Instructions are not carried over: it is another conversation without them.
    client.responses.create(model="m", input="Again", previous_response_id=first.id)
    assert extended(served) == before + 2


def test_a_conversation_extends_over_items_sent_back(served: Gateway, client: openai.OpenAI) -> None:
    before = extended(served)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    first = client.responses.create(model="m", input=items, store=False)
    items += [*first.output, {"role": "user", "content": "Again"}]
    second = client.responses.create(model="m", input=items, store=False)
    assert second.output_text == "Once more."
    # In the client's own words.
    items += [{"role": "assistant", "content": " Once  more.\n"}, {"role": "user", "content": "Thrice"}]
    assert client.responses.create(model="m", input=items).output_text == "And again."
    assert extended(served) == before + 2


def test_tools_and_their_outputs(served: Gateway, client: openai.OpenAI) -> None:
    before = extended(served)
    items: list[Any] = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "How warm is it?"},
        {"type": "reasoning", "id": "rs_x", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
    ]
    first = client.responses.create(model="m", input=items, tools=[WEATHER])  # type: ignore[list-item]
    assert first.output_text == "It is 21 degrees."
    second = client.responses.create(
        model="m",
        input="Hello",
        tools=[WEATHER],  # type: ignore[list-item]
        previous_response_id=first.id,
    )
    assert second.output_text == HELLO
    assert extended(served) == before + 1


def test_stored_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="Hello")
    second = client.responses.create(model="m", input="Again", previous_response_id=first.id)
    again = client.responses.retrieve(second.id)
    assert again.to_dict() == second.to_dict()
    items = client.responses.input_items.list(second.id, limit=2)
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == ["Again", HELLO, "Hello"]
    ascending = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in ascending.data] == ["message"] * 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="Again", previous_response_id=first.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    passing = client.responses.create(model="m", input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(passing.id)


def test_refusals_name_their_field(client: openai.OpenAI) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 0.5}, "top_p"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": [image]}, "input[0].content[0].type"),
        ({"text": {"format": {"type": "shoe"}}}, "text.format"),
    ]
    for changes, param in refusals:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**{"model": "m", "input": "Hello", **changes})
        assert refused.value.param == param
        assert param.rsplit(".", 1)[-1] in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="word " * 1000, stream=True)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
