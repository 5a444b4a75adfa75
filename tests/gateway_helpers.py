"""A gateway as an agent meets it: an orchestrator in this process, a mock engine with answers to order, a rollout."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import render_helpers
from engine_helpers import mock_command, running
from primerl._core import Orchestrator
from primerl.render import Renderer
from primerl.run_key import run_key_header
from test_orchestrator_in_process import PATIENCE_S, begin, post, publish, settings

Message = dict[str, Any]


@dataclass
class Gateway:
    orchestrator: Orchestrator
    renderer: Renderer
    output: Path
    worker: int
    lease: dict[str, Any]

    @property
    def base_url(self) -> str:
        """Of the open rollout, ending in `/v1`."""
        return str(self.lease["base_url"])

    @property
    def api_key(self) -> str:
        """Of the open rollout."""
        return str(self.lease["api_key"])

    @property
    def root_url(self) -> str:
        """Of the open rollout, without `/v1`: what Anthropic's SDK takes."""
        return self.base_url.removesuffix("/v1")

    def another_rollout(self) -> dict[str, Any]:
        return lease(self.orchestrator.url, self.worker)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.api_key}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return httpx.post(f"{self.base_url}/{path}", json=body, headers=headers, timeout=PATIENCE_S)

    def turns(self) -> dict[str, int]:
        """Recorded turns by how their prompts were made, such as `extended`."""
        url = f"{self.orchestrator.url}/metrics"
        metrics = httpx.get(url, headers=run_key_header(url), timeout=60).text
        lines = [line for line in metrics.splitlines() if line.startswith("primerl_turns_total")]
        return {line.split('"')[1]: int(line.rsplit(" ", 1)[1]) for line in lines}


def lease(url: str, worker: int) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = post(f"{url}/envs/lease", {"worker": worker, "max": 1})
        if answer["rollouts"]:
            return dict(answer["rollouts"][0])
        assert time.monotonic() < deadline, answer["reason"]


def scripted(renderer: Renderer, answers: list[tuple[str, str]], prompt_end: str) -> list[dict[str, list[int]]]:
    """For the mock engine: after a user's or a tool's last words, the model says this. Both are text; an answer ends
    with the stop token. `prompt_end` is what the template writes between the words and the answer."""
    return [
        {"after": renderer.encode(f"{words}{prompt_end}"), "answer": renderer.encode(answer)}
        for words, answer in answers
    ]


QWEN_PROMPT_END = "<|im_end|>\n<|im_start|>assistant\n"


@contextlib.contextmanager
def gateway(
    folder: Path,
    mock_binary: Path,
    *,
    answers: list[tuple[str, str]] = (),  # type: ignore[assignment]
    template: str = "qwen2_5",
    flags: tuple[str, ...] = (),
    before: Callable[[str], AbstractContextManager[str]] = contextlib.nullcontext,
    **changes: Any,
) -> Iterator[Gateway]:
    """`answers` are pairs of the last words before an answer and the answer, both as Qwen's template writes them.
    `before` puts something between the orchestrator and the engine: it takes the engine's URL and gives its own."""
    model = render_helpers.write_qwen(folder / "model", render_helpers.trl_template(template))
    renderer = Renderer(model)
    script = folder / "script.json"
    script.write_text(json.dumps(scripted(renderer, list(answers), QWEN_PROMPT_END)))
    stop = str(renderer.stop_token_ids[-1])
    sampling = ["--vocab-size", "2000", "--eos-token-id", stop, "--last-token", "250", "--script", str(script)]
    command = mock_command(mock_binary, *sampling, *flags)
    output = folder / "out"
    with running("mock", command, None, folder / "engine.log") as engine, before(engine.url) as url:
        defaults = {"sampling": {"max_tokens": 200}, "seq_len": 1000, "batch_size": 64}
        config = settings(model, output, engines=[url], **{**defaults, **changes})
        with Orchestrator(config) as orchestrator:
            begin(orchestrator, output)
            publish(orchestrator, output, 0)
            registration = {"environment": "task", "role": "train", "name": "w", "pid": 1, "examples": 10}
            worker = post(f"{orchestrator.url}/envs/register", registration)["worker"]
            yield Gateway(orchestrator, renderer, output, worker, lease(orchestrator.url, worker))
