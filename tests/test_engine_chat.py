"""The engines' chat route, as vLLM serves it: what it renders, samples and refuses, against plain generation."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import render_helpers
from engine_helpers import KINDS, Engine, mock_command, running, torch_command, wait_until
from primerl.render import Renderer

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Reverse: abc"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief – ä."},
    *QUESTION,
    {"role": "assistant", "content": "<r>cba</r>"},
    {"role": "user", "content": "Again"},
]


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, mock_binary: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    is_mock = request.param == "mock"
    command = mock_command(mock_binary, "--chat-model", str(model)) if is_mock else torch_command(model, folder)
    with running(request.param, command, None if is_mock else model, folder / "log") as engine:
        yield engine


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return Renderer(model)


def asked(messages: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": QUESTION if messages is None else messages,
        "max_completion_tokens": 20,
        "logprobs": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **changes,
    }


def answered(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    answer = engine.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def single(number: float) -> bytes:
    """A float32, however many digits it was written with."""
    return struct.pack("f", number)


def refused(engine: Engine, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    answer = engine.post(path, body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize("messages", [QUESTION, CONVERSATION])
def test_it_samples_what_generation_samples_from_the_same_ids(
    engine: Engine, renderer: Renderer, messages: list[dict[str, Any]]
) -> None:
    ids = renderer.render(messages)
    body = asked(messages, seed=3, top_logprobs=3, temperature=0.8)
    answer = answered(engine, body)
    (choice,) = answer["choices"]
    sampling = {"seed": 3, "logprobs": 3, "max_tokens": 20, "temperature": 0.8}
    plain = engine.generate(ids, stop_token_ids=renderer.stop_token_ids, **sampling)["choices"][0]
    assert answer["prompt_token_ids"] == ids
    assert choice["token_ids"] == plain["token_ids"]
    assert choice["finish_reason"] == plain["finish_reason"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    content = choice["logprobs"]["content"]
    for token, entry, expected in zip(choice["token_ids"], content, plain["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token}"
        tops = [(f"token_id:{other['token_id']}", single(other["logprob"])) for other in expected["top_logprobs"]]
        assert [(other["token"], single(other["logprob"])) for other in entry["top_logprobs"]] == tops
        assert single(entry["logprob"]) == single(expected["logprob"])


def test_ids_come_only_when_asked_for(engine: Engine) -> None:
    answer = answered(engine, {"model": "m", "messages": QUESTION, "max_tokens": 3})
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] is choice["token_ids"] is choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant"


def test_tokenize_renders_as_the_chat_route_does(engine: Engine, renderer: Renderer) -> None:
    for messages in (QUESTION, CONVERSATION):
        answer = engine.post("/tokenize", {"model": "m", "messages": messages}).json()
        assert answer["tokens"] == renderer.render(messages)
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 1024)
    assert engine.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()["token_strs"] == list("abc")


def test_stop_tokens_end_an_answer_and_belong_to_it(engine: Engine) -> None:
    body = asked(seed=5, ignore_eos=True)
    whole = answered(engine, body)["choices"][0]["token_ids"]
    stop = whole[3]
    (choice,) = answered(engine, {**body, "stop_token_ids": [stop]})["choices"]
    assert choice["token_ids"] == whole[: whole.index(stop) + 1]
    assert choice["finish_reason"] == "stop"


def test_what_does_not_fit_is_refused(engine: Engine) -> None:
    long = [{"role": "user", "content": "a" * 1100}]
    error = refused(engine, asked(long))
    assert error["param"] == "input_tokens"
    assert "maximum context length is 1024" in error["message"]
    error = refused(engine, asked(max_completion_tokens=1020))
    assert error["param"] == "max_tokens"
    assert "is too large" in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"stream": True},
        {"n": 2},
        {"stop": ["x"]},
        {"response_format": {"type": "shoe"}},
        {"tool_choice": "required"},
        {"chat_template": "{{ messages }}"},
        {"documents": [{"text": "a"}]},
        {"continue_final_message": True},
        {"frequency_penalty": 0.5},
    ],
)
def test_what_it_cannot_do_is_refused_by_name(engine: Engine, change: dict[str, Any]) -> None:
    error = refused(engine, asked(**change))
    assert error["param"] == next(iter(change))
    assert "not supported by this engine" in error["message"]


def test_bad_bodies_are_refused(engine: Engine) -> None:
    assert refused(engine, {"model": "m"})["param"] == "body.messages"
    assert refused(engine, asked([]))["param"] == "body.messages"
    assert refused(engine, asked([{"content": "a"}]))["param"] == "body.messages"
    assert refused(engine, asked(logprobs=False, top_logprobs=2))["param"] == "top_logprobs"
    assert refused(engine, asked(top_logprobs=50))["param"] == "logprobs"
    assert refused(engine, asked(temperature=-1))["param"] == "temperature"
    assert engine.post(CHAT, asked(model="other")).status_code == 404


def test_a_client_that_hangs_up_ends_its_request(engine: Engine) -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 900, "ignore_eos": true}'
    host, port = engine.url.removeprefix("http://").split(":")
    before = engine.metric("vllm:generation_tokens_total")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: engine.metric("vllm:generation_tokens_total") > before, "the request's start")
    wait_until(lambda: engine.running() == 0, "the request's end")
    assert engine.metric("vllm:generation_tokens_total") - before < 900


def test_openais_sdk_is_served(engine: Engine) -> None:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="m", messages=QUESTION, max_completion_tokens=5)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 5


def test_tools_and_template_arguments_reach_the_template(mock_binary: Path, tmp_path: Path) -> None:
    folder = render_helpers.write_qwen(tmp_path / "model", render_helpers.trl_template("qwen3"))
    renderer = Renderer(folder)
    tools = render_helpers.TOOLS
    flags = ["--vocab-size", "2000", "--last-token", "250", "--chat-model", str(folder)]
    with running("mock", mock_command(mock_binary, *flags), None, tmp_path / "log") as engine:
        body = asked(max_completion_tokens=3, tools=tools, tool_choice="none", ignore_eos=True)
        rendered = answered(engine, body)["prompt_token_ids"]
        assert rendered == renderer.render(QUESTION, tools=tools)
        assert rendered == engine.post("/tokenize", {"messages": QUESTION, "tools": tools}).json()["tokens"]
        no_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
        rendered = answered(engine, asked(max_completion_tokens=3, **no_thinking))["prompt_token_ids"]
        assert rendered == renderer.render(QUESTION, template_kwargs={"enable_thinking": False})
        assert rendered != renderer.render(QUESTION)


def test_without_a_model_folder_messages_are_refused(mock_binary: Path, tmp_path: Path) -> None:
    with running("mock", mock_command(mock_binary), None, tmp_path / "log") as engine:
        for path in (CHAT, "/tokenize"):
            error = refused(engine, {"messages": QUESTION}, path)
            assert "without a model folder" in error["message"]
        assert engine.generate(max_tokens=1)["choices"]
