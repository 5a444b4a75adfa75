"""The chat dialect as OpenAI's own SDK speaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_helpers import Gateway, gateway

ANSWERS = [
    ("Hello", "Hi there, how are you?<|im_end|>"),
    ("Emoji", "👩‍👩‍👧 é ü<|im_end|>"),
    ("Again", "Once more.<|im_end|>"),
]


@pytest.fixture(scope="module")
def served(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), mock_binary, answers=ANSWERS) as served:
        yield served


@pytest.fixture
def client(served: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=served.api_key) as client:
        yield client


def test_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].message.content == "Hi there, how are you?"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("words", ["Hello", "Emoji"])
def test_streamed(client: openai.OpenAI, words: str) -> None:
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": words}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == dict(ANSWERS)[words].removesuffix("<|im_end|>")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].delta.content) > 1


def test_asynchronous(served: Gateway) -> None:
    async def ask() -> str | None:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key) as client:
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
            return answer.choices[0].message.content

    assert asyncio.run(ask()) == "Hi there, how are you?"


def test_several_choices_stops_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hello"}], n=2, stop=["how"], logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["Hi there, ", "Hi there, "]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content).startswith("Hi there, how")
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hello"}], n=2, stop=["how"], stream=True
    )
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["Hi there, ", "Hi there, "]


def test_a_conversation_extends_however_answers_come_back(served: Gateway) -> None:
    rollout = served.another_rollout()
    with openai.OpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"]) as client:
        before = served.turns().get("extended", 0)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
        messages = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": " Hi there,  how are you?\n", "refusal": None},
            {"role": "user", "content": "Again"},
        ]
        answer = client.chat.completions.create(model="m", messages=messages, max_tokens=50)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "Once more."
        assert served.turns()["extended"] == before + 1


def test_retries_get_the_same_answer_and_repeats_another(served: Gateway) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Something random"}]}

    def ask(**headers: str) -> str:
        answer = served.post("chat/completions", body, **headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    first = ask()
    assert ask(x_stainless_retry_count="1") == first
    assert ask() != first
    keyed = ask(Idempotency_Key="k")
    assert ask(Idempotency_Key="k") == keyed
    assert ask(Idempotency_Key="l") != keyed


def test_refusals_are_the_sdks_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}], top_p=0.5)
    assert refused.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 1000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 1000}], stream=True)
    assert refused.value.code == "context_length_exceeded"


def test_the_runs_variables_of_the_template_are_in_every_prompt(mock_binary: Path, tmp_path: Path) -> None:
    """Turn by turn: what was sampled is gone on from, token by token."""
    sampling = {"max_tokens": 8, "chat_template_kwargs": {"enable_thinking": False}}
    with (
        gateway(tmp_path, mock_binary, template="qwen3", sampling=sampling) as served,
        openai.OpenAI(base_url=served.base_url, api_key=served.api_key) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "Hello"}]

        def ask(**more: Any) -> tuple[list[int], list[int], str]:
            body = {"return_token_ids": True, **more}
            answer = client.chat.completions.create(model="m", messages=messages, extra_body=body).model_dump()
            [choice] = answer["choices"]
            return answer["prompt_token_ids"], choice["token_ids"], choice["message"]["content"]

        first, sampled, said = ask()
        assert served.renderer.decode(first).endswith("<think>\n\n</think>\n\n")
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again"}]
        second, _, _ = ask()
        assert second[: len(first) + len(sampled)] == first + sampled
        assert served.renderer.decode(second).endswith("<think>\n\n</think>\n\n")
        # The request's own counts before the run's.
        thinking, _, _ = ask(chat_template_kwargs={"enable_thinking": True})
        assert not served.renderer.decode(thinking).endswith("</think>\n\n")
