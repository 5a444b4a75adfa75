"""The text completions dialect as OpenAI's own SDK speaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_helpers import QWEN_PROMPT_END, Gateway, gateway
from openai.types import Completion

HELLO = "Hi there, how are you?"
PROMPT = f"<|im_start|>user\nHello{QWEN_PROMPT_END}"
ANSWERS = [("Hello", f"{HELLO}<|im_end|>"), ("Emoji", "👩‍👩‍👧 é ü<|im_end|>"), ("Again", "Once more.<|im_end|>")]


@pytest.fixture(scope="module")
def served(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), mock_binary, answers=ANSWERS) as served:
        yield served


@pytest.fixture
def client(served: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0) as client:
        yield client


def test_every_shape_of_one_prompt(served: Gateway, client: openai.OpenAI) -> None:
    ids = served.renderer.encode(PROMPT)
    prompts: list[Any] = [PROMPT, [PROMPT], ids, [ids]]
    for prompt in prompts:
        answer = client.completions.create(model="m", prompt=prompt)
        assert answer.choices[0].text == HELLO
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)


def test_the_body_is_of_its_type(served: Gateway) -> None:
    body = served.post("completions", {"model": "m", "prompt": PROMPT, "logprobs": 2}).json()
    answer = Completion.model_validate(body, strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == f"{HELLO}<|im_end|>"
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
    assert logprobs.top_logprobs is not None
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


@pytest.mark.parametrize("words", ["Hello", "Emoji"])
def test_streamed(client: openai.OpenAI, words: str) -> None:
    prompt = PROMPT.replace("Hello", words)
    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(model="m", prompt=prompt, stream=True, stream_options=options))
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == dict(ANSWERS)[words].removesuffix("<|im_end|>")
    assert sum(1 for text in texts if text) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None


def test_asynchronous(served: Gateway) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key) as client:
            answer = await client.completions.create(model="m", prompt=PROMPT, n=2, stop="how")
            return "|".join(choice.text for choice in answer.choices)

    assert asyncio.run(ask()) == "Hi there, |Hi there, "


def test_ids_in_and_out_extend(served: Gateway) -> None:
    rollout = served.another_rollout()
    with openai.OpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"]) as client:
        before = served.turns().get("extended", 0)
        ids = served.renderer.encode(PROMPT)
        wanted = {"return_token_ids": True}
        first = client.completions.create(model="m", prompt=ids, extra_body=wanted).to_dict()
        choice: Any = first["choices"][0]  # type: ignore[index]
        assert choice["prompt_token_ids"] == ids
        more = served.renderer.encode(f"\n<|im_start|>user\nAgain{QWEN_PROMPT_END}")
        prompt = [*ids, *choice["token_ids"], *more]
        assert client.completions.create(model="m", prompt=prompt).choices[0].text == "Once more."
        assert served.turns()["extended"] == before + 1


def test_refusals_name_their_field(client: openai.OpenAI) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"top_p": 0.5}, "top_p"),
    ]
    for changes, param in refusals:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{"model": "m", "prompt": PROMPT, **changes})
        assert refused.value.param == param
        assert param in refused.value.message
