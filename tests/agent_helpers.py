"""What engines sampled, written down as the orchestrator gets it, and its comparison with what is to be trained."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

import httpx
import torch
from engine_helpers import GENERATE
from primerl.train.data.batch import Batch
from test_orchestrator_in_process import PATIENCE_S, post


@dataclass(frozen=True)
class Sampled:
    """One answer of an engine, and what it is the answer to."""

    rollout: int
    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Recorder:
    """Stands before an engine and passes everything on as it is."""

    url: str = ""
    answers: list[Sampled] = field(default_factory=list)

    def of(self, rollout: dict[str, Any]) -> list[Sampled]:
        return [answer for answer in self.answers if answer.rollout == rollout["rollout"]]

    def status(self, path: str, answer: httpx.Response) -> int:
        return answer.status_code

    def forward(self, path: str, body: bytes, answer: httpx.Response, out: BufferedIOBase) -> None:
        """Writes the engine's answer, whose head is written, to whoever asked."""
        whole = b""
        for piece in answer.iter_bytes():
            whole += piece
            out.write(piece)
        if path == GENERATE and answer.status_code == 200:
            self.note(json.loads(body), whole)

    def note(self, request: dict[str, Any], answer: bytes) -> None:
        text = answer.decode()
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        choices = [choice for part in events or [text] for choice in json.loads(part)["choices"]]
        self.answers.append(
            Sampled(
                # "rollout-<id>-<number>"
                int(request["request_id"].split("-")[1]),
                request["token_ids"],
                [token for choice in choices for token in choice.get("token_ids") or []],
                [token["logprob"] for choice in choices for token in (choice.get("logprobs") or {}).get("content", [])],
            )
        )


@contextlib.contextmanager
def recording(recorder: Recorder, engine_url: str) -> Iterator[str]:
    """Serves the engine's calls at the URL that it gives."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {"content-type": "application/json"}
            # When the orchestrator hangs up, so does this.
            gone = contextlib.suppress(BrokenPipeError, ConnectionResetError)
            with gone, client.stream(self.command, self.path, content=body, headers=headers) as answer:
                self.send_response(recorder.status(self.path, answer))
                self.send_header("content-type", answer.headers.get("content-type", "application/json"))
                self.end_headers()
                recorder.forward(self.path, body, answer, self.wfile)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with httpx.Client(base_url=engine_url, timeout=PATIENCE_S) as client:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # Its threads are waited for at the end, so that no socket outlives the test.
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def report(url: str, worker: int, rollout: dict[str, Any], reward: float, sessions: tuple[str, ...] = ("",)) -> None:
    traces = [
        {
            "session": session,
            "trainable": True,
            "ok": True,
            "reward": reward,
            "metrics": {},
            "stop_condition": None,
            "truncated": False,
        }
        for session in sessions
    ]
    outcome = {"ok": True, "traces": traces, "error": None}
    answer = post(f"{url}/envs/result", {"worker": worker, "rollout": rollout["rollout"], "outcome": outcome})
    assert answer["accepted"]


@dataclass
class Sample:
    """One sequence of a batch; `trained` says which tokens are, and are not explained yet."""

    token_ids: list[int]
    logprobs: list[float]
    trained: list[bool]


def samples_of(batch: Batch) -> dict[int, list[Sample]]:
    samples: dict[int, list[Sample]] = {}
    for micro_batch in batch.micro_batches:
        lengths = list(micro_batch.sequence_lengths)
        columns = (micro_batch.token_ids, micro_batch.logprobs, micro_batch.loss_mask)
        parts = zip(*(torch.split(column, lengths) for column in columns), strict=True)
        for rollout, (token_ids, logprobs, loss_mask) in zip(micro_batch.rollouts, parts, strict=True):
            sample = Sample(token_ids.tolist(), logprobs.tolist(), [mask == 1 for mask in loss_mask.tolist()])
            samples.setdefault(rollout, []).append(sample)
    return samples


def explain(sample: Sample, answer: Sampled) -> bool:
    """Whether the sample trains this answer behind the very prompt that the engine saw. It is crossed off then."""
    begin, end = len(answer.prompt), len(answer.prompt) + len(answer.token_ids)
    found = sample.token_ids[:end] == answer.prompt + answer.token_ids and all(sample.trained[begin:end])
    if found:
        # The batch holds 32 bits of each.
        assert sample.logprobs[begin:end] == torch.tensor(answer.logprobs, dtype=torch.float32).tolist()
        sample.trained[begin:end] = [False] * len(answer.token_ids)
    return found


def check_every_token_is_trained_once(answers: list[Sampled], samples: list[Sample]) -> None:
    for answer in answers:
        assert answer.token_ids
        assert len(answer.token_ids) == len(answer.logprobs)
        # One is crossed off, and only one: `any` ends at the first.
        assert any(explain(sample, answer) for sample in samples), answer
    left = [sum(sample.trained) for sample in samples]
    assert not any(left), f"tokens are trained that no engine sampled: {left}"
