"""Test doubles for the trainer: batches in the orchestrator's wire format, and a small server that hands them out."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import xxhash
from primerl.train.data.batch import Batch


def no_room(monkeypatch: pytest.MonkeyPatch, free: int, *, on: str | None = None) -> None:
    """Disks have so many bytes free; only that of folders named `on`, where it is given."""
    usage = shutil.disk_usage

    def small(path: Path) -> Any:
        found = usage(path)
        return found._replace(free=free) if on in (None, Path(path).name) else found

    monkeypatch.setattr(shutil, "disk_usage", small)


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """What is written beyond that many bytes fails, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """What is trained of the model, such as an adapter, which begins as none."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


@dataclass
class Sequence:
    """One sample: prompt tokens, then tokens sampled by the policy."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    version: int = 0
    advantage: float = 1.0
    temperature: float = 1.0
    rollout: int = 0
    environment: int = 0
    extra: dict[str, list[float]] = field(default_factory=dict)
    """Columns that not every batch has, a value for each token of prompt and sample."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.sampled)

    def columns(self) -> dict[str, list[Any]]:
        n, m = len(self.prompt), len(self.sampled)
        return {
            "token_ids": self.prompt + self.sampled,
            "loss_mask": [0] * n + [1] * m,
            "logprobs": [0.0] * n + self.logprobs,
            "advantages": [self.advantage] * (n + m),
            "versions": [-1] * n + [self.version] * m,
            "temperatures": [self.temperature] * (n + m),
        }


FORMATS = {"token_ids": "i", "logprobs": "f", "advantages": "f", "versions": "i", "temperatures": "f", "loss_mask": "B"}


def encode_micro_batch(sequences: list[Sequence], omitted: list[Any] | None = None) -> tuple[dict[str, Any], bytes]:
    """Header and columns. `omitted`: leading tokens of each sequence that are omitted."""
    values: dict[str, list[Any]] = {name: [] for name in FORMATS}
    for sequence, left_out in zip(sequences, omitted or [0] * len(sequences), strict=False):
        for name, column in sequence.columns().items():
            values[name] += column[left_out:]
    packed = [struct.pack(f"<{len(values[name])}{kind}", *values[name]) for name, kind in FORMATS.items()]
    columns = b"".join(packed)
    extra = list(sequences[0].extra) if sequences else []
    for name in extra:
        column = [value for sequence in sequences for value in sequence.extra[name]]
        columns += b"\0" * (-len(columns) % 16) + struct.pack(f"<{len(column)}f", *column)
    lengths = [len(sequence) for sequence in sequences]
    header = {
        "tokens": sum(lengths),
        "sequence_lengths": lengths,
        "rollouts": [sequence.rollout for sequence in sequences],
        "environments": [sequence.environment for sequence in sequences],
        **({"extra_columns": extra} if extra else {}),
        **({"omitted": omitted} if omitted else {}),
    }
    return header, columns + b"\0" * (-len(columns) % 16)


def encode_frame(header: dict[str, Any], columns: bytes, *, checked: bool = True) -> bytes:
    """`checked`: with a checksum, which batches of earlier versions do not have."""

    def binary(value: bytes) -> bytes:
        return b"\xc6" + struct.pack(">I", len(value)) + value

    padding = -(26 + len(msgpack.packb({**header, "padding": b""}))) % 16
    packed = msgpack.packb({**header, "padding": b"\0" * padding})
    if not checked:
        return b"\x82\xa6header" + binary(packed) + b"\xa7columns" + binary(columns)
    body = b"\x83\xa6header" + binary(packed) + b"\xa7columns" + binary(columns)
    return body + b"\xa4xxh3\xc4\x08" + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def encode_batch(
    step: int,
    micro_batches: list[list[Sequence]],
    *,
    rank: int = 0,
    ranks: int = 1,
    loss_tokens: int | None = None,
    metrics: dict[str, float] | None = None,
    truncations: dict[int, list[dict[str, Any]]] | None = None,
    grammars: dict[int, dict[str, Any]] | None = None,
    shared: dict[int, list[int]] | None = None,
    omitted: dict[int, list[int]] | None = None,
    checked: bool = True,
) -> bytes:
    """`truncations`: runs of truncated tokens by the micro-batch's number; `grammars`: kinds and runs, likewise;
    `shared`: tokens that sequences take over, `omitted`: those that are omitted, likewise; `checked`: see
    `encode_frame`."""
    own = sum(len(sequence.sampled) for micro_batch in micro_batches for sequence in micro_batch)
    left_out = omitted or {}
    encoded = [encode_micro_batch(own, left_out.get(number)) for number, own in enumerate(micro_batches)]
    for number, runs in (truncations or {}).items():
        encoded[number][0]["truncations"] = runs
    for number, structured in (grammars or {}).items():
        encoded[number][0]["grammars"] = structured
    for number, taken_over in (shared or {}).items():
        encoded[number][0]["shared"] = taken_over
    fields = {
        "step": step,
        "rank": rank,
        "ranks": ranks,
        "loss_tokens": own if loss_tokens is None else loss_tokens,
        "metrics": metrics or {},
        "micro_batches": [header for header, _ in encoded],
    }
    return encode_frame(fields, b"".join(columns for _, columns in encoded), checked=checked)


Answer = tuple[int, bytes]
"""Status and body; status 0 closes the connection without an answer."""

AHEAD = "/trainer/batch ahead"


@dataclass
class OrchestratorDouble:
    """Answers the trainer's calls. `batch(step, rank)` decides what a batch request gets, `ahead` what one gets that
    does not wait, `before_weights` what is answered to weights, where it is not that they are taken."""

    batch: Callable[[int, int], Answer]
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    before_weights: Callable[[dict[str, Any]], Answer | None] = lambda fields: None
    ahead: Callable[[int, int], Answer] = lambda step, rank: waiting("it to be asked for")
    trainers: list[dict[str, Any] | None] = field(default_factory=list)
    """Who made each call, as it says itself."""

    def __enter__(self) -> OrchestratorDouble:
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body are two packets, and the second would wait for the first one's acknowledgement.
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                fields = msgpack.unpackb(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = double.answer(self.path, fields)
                if status == 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, fields: dict[str, Any]) -> Answer:
        if fields.pop("ahead", False):
            path = AHEAD
        self.trainers.append(fields.pop("trainer", None))
        self.calls.append((path, fields))
        if path == AHEAD:
            return self.ahead(fields["step"], fields["rank"])
        if path == "/trainer/batch":
            return self.batch(fields["step"], fields["rank"])
        if path == "/trainer/weights":
            answer = self.before_weights(fields)
            if answer is not None:
                return answer
        return 200, msgpack.packb({})

    def called(self, path: str) -> list[dict[str, Any]]:
        return [fields for called, fields in self.calls if called == path]


def waiting(reason: str) -> Answer:
    return 202, msgpack.packb({"waiting_for": reason})


def asks_again(version: int, why: str) -> Answer:
    """No engine can load what was published of this version."""
    return 202, msgpack.packb({"waiting_for": "an engine", "publish_again": {"version": version, "why": why}})


def unreadable_manifest(why: str) -> Answer:
    error = {"message": why, "type": "invalid_request_error", "param": "manifest", "code": "invalid_request"}
    return 400, json.dumps({"error": error}).encode()


def gone(message: str = "the run is over") -> Answer:
    return 410, json.dumps({"error": {"message": message, "type": "gone", "param": None, "code": "finished"}}).encode()


def cross_entropy(folder: Path, batches: list[Batch]) -> float:
    """By transformers, one sequence at a time: the sum weighted by `ce_weights`, by the number of its tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, tokens = 0.0, 0
    for micro_batch in (own for batch in batches for own in batch.micro_batches):
        lengths = list(micro_batch.sequence_lengths)
        columns = (micro_batch.token_ids, micro_batch.extra["ce_weights"])
        for ids, weights in zip(*(torch.split(values, lengths) for values in columns), strict=True):
            with torch.no_grad():
                logprobs = model(ids[None].long()).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, ids[1:, None].long()).squeeze(1)
            total -= float((own * weights[1:]).sum())
            tokens += int((weights > 0).sum())
    return total / tokens
