"""Engines that fail, as the official SDKs tell their callers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_helpers import Recorder, recording, report
from engine_helpers import GENERATE, wait_until
from gateway_helpers import Gateway, gateway
from test_orchestrator_in_process import publish

WORDS = "one two three four five six seven eight nine ten"
ANSWERS = [("Count", f"{WORDS}<|im_end|>")]


@dataclass
class Meddler(Recorder):
    """Stands before an engine that fails to order."""

    refuses: bool = False
    """Every call that samples is answered with 500."""
    cuts: bool = False
    """Streams end after their second event, which comes once `resumed` is set."""
    resumed: threading.Event = field(default_factory=threading.Event)

    def status(self, path: str, answer: httpx.Response) -> int:
        return 500 if self.refuses and path == GENERATE else super().status(path, answer)

    def forward(self, path: str, body: bytes, answer: httpx.Response, out: BufferedIOBase) -> None:
        if not (self.cuts and path == GENERATE):
            super().forward(path, body, answer, out)
            return
        lines = answer.iter_lines()
        for ends in range(2):
            for line in lines:
                out.write(line.encode() + b"\n")
                if not line:
                    break
            out.flush()
            assert ends or self.resumed.wait(60), "nobody let the stream go on"


@pytest.fixture(scope="module")
def meddler() -> Meddler:
    return Meddler()


@pytest.fixture(scope="module")
def served(meddler: Meddler, mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    sizes = {"batch_size": 2, "group_size": 2}
    with gateway(folder, mock_binary, answers=ANSWERS, before=partial(recording, meddler), **sizes) as served:
        yield served


@pytest.fixture
def agent(served: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0) as agent:
        yield agent


COUNT: list[Any] = [{"role": "user", "content": "Count"}]


def ask_openai(route: str, agent: openai.OpenAI, **options: Any) -> Any:
    asked = {
        "chat": lambda: agent.chat.completions.create(model="m", messages=COUNT, **options),
        "responses": lambda: agent.responses.create(model="m", input="Count", **options),
        "completions": lambda: agent.completions.create(model="m", prompt="Count", **options),
    }
    return asked[route]()


def refusal(served: Gateway, agent: openai.OpenAI, route: str, stream: bool) -> tuple[int, str, str, str]:
    """Status, type, code and message of the SDK's error."""
    if route == "messages":
        root = served.root_url
        with (
            anthropic.Anthropic(base_url=root, api_key=served.api_key, max_retries=0) as other,
            pytest.raises(anthropic.InternalServerError) as refused,
        ):
            other.messages.create(model="m", max_tokens=20, messages=COUNT, stream=stream)
        error: Any = refused.value.body
        assert error["type"] == "error"
        error = error["error"]
        return refused.value.status_code, error["type"], error["code"], error["message"]
    with pytest.raises(openai.InternalServerError) as failed:
        ask_openai(route, agent, stream=stream)
    value = failed.value
    return value.status_code, str(value.type), str(value.code), value.message


def test_engines_that_fail_are_the_servers_error(served: Gateway, meddler: Meddler, agent: openai.OpenAI) -> None:
    """Whole or streamed: nothing was shown yet, so there is a status to tell it with."""
    kinds = dict.fromkeys(("chat", "responses", "completions"), "server_error") | {"messages": "overloaded_error"}
    meddler.refuses = True
    try:
        with ThreadPoolExecutor(8) as pool:
            asked = [
                (route, pool.submit(refusal, served, agent, route, stream))
                for route in kinds
                for stream in (False, True)
            ]
            refused = [(route, told.result()) for route, told in asked]
    finally:
        meddler.refuses = False
    for route, (status, kind, code, message) in refused:
        assert (route, status, kind, code) == (route, 503, kinds[route], "engine_unavailable")
        assert "the engines failed 6 times" in message


def train_one_step(served: Gateway) -> None:
    """So that another version of the weights may come. The first of these rollouts is of the open one's group."""
    for reward in (1.0, 0.0, 1.0):
        rollout = served.another_rollout()
        with openai.OpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"]) as agent:
            ask_openai("chat", agent)
        report(served.orchestrator.url, served.worker, rollout, reward)
    assert served.orchestrator.next_batch(1, 0) is not None


def test_an_answer_that_nobody_can_go_on_with_ends_with_its_reason(
    served: Gateway, meddler: Meddler, agent: openai.OpenAI
) -> None:
    """What came during the update may be of the old weights or of the new ones, and the engine that knew is gone."""
    train_one_step(served)
    meddler.cuts = True
    try:
        stream = ask_openai("chat", agent, stream=True)
        shown = next(text for chunk in stream if (text := chunk.choices[0].delta.content))
        assert WORDS.startswith(shown)
        publish(served.orchestrator, served.output, 1)
        wait_until(lambda: served.orchestrator.status()["engines"][0]["version"] == 1, "the update")
    finally:
        meddler.cuts = False
        meddler.resumed.set()
    with pytest.raises(openai.APIError) as ended:
        list(stream)
    assert ended.value.code == "answer_interrupted"
    assert "its weights may have changed" in ended.value.message
    # Asked again, it is answered.
    assert ask_openai("chat", agent).choices[0].message.content == WORDS
