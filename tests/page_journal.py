"""The folder of a run without a run: the core plays what is written here, event by event."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack
from primerl._core import Orchestrator

Event = dict[str, Any]
SEGMENT_BYTES = 64 << 20
MAGIC = b"PRIMERL\x05"
PROMPT, SAMPLED = 60, 40


def begin(
    output: Path, model: Path, *, steps: int, batch: int, group: int, environments: tuple[str, ...] = ("task",)
) -> None:
    """The core as it is made, in a snapshot before the first event."""
    config = {
        "output_dir": str(output),
        "max_steps": steps,
        "seq_len": 512,
        "batch_size": batch,
        "group_size": group,
        "model": {"path": str(model), "name": "m"},
        "sampling": {"max_tokens": SAMPLED},
        "train": {"env": [{"id": "task", "name": name} for name in environments]},
    }
    with Orchestrator(config) as orchestrator:
        orchestrator.start()
    journal = output / "journal"
    for file in journal.iterdir():
        if file.name != "000000000000.snapshot":
            file.unlink()


class Journal:
    """Events, in segments as the orchestrator writes them."""

    def __init__(self, output: Path) -> None:
        self.folder = output / "journal"
        self.count = 0
        self._clock = 0
        self._first = 0
        self._size = 0

    def write(self, events: Iterable[Event]) -> None:
        """All of them are in the files when it returns."""
        parts: list[bytes] = []
        for event in events:
            self._clock += 400
            body = msgpack.packb([self._clock, event])
            length = struct.pack("<I", len(body))
            if self._size == 0:
                parts.append(MAGIC)
            parts += [length, struct.pack("<II", zlib.crc32(length), zlib.crc32(body)), body]
            self.count += 1
            self._size += len(body) + 12
            if self._size > SEGMENT_BYTES:
                self._append(parts)
                parts, self._first, self._size = [], self.count, 0
        self._append(parts)

    def _append(self, parts: list[bytes]) -> None:
        with (self.folder / f"{self._first:012}.log").open("ab") as file:
            file.write(b"".join(parts))


def start() -> Iterator[Event]:
    """A worker and an engine, which has the first weights."""
    yield {"environment_ready": {"environment": 0, "examples": 1000}}
    yield {"worker_joined": {"worker": 0, "environment": 0, "name": "env_task_0:1"}}
    yield {"engine_joined": {"engine": 0, "url": "http://e"}}
    yield {"weights_published": {"version": 0, "manifest": "m", "digest": "0"}}
    yield {"engine_proved": {"engine": 0, "version": 0}}


def lease(request: int, count: int) -> Event:
    return {"lease_requested": {"request": request, "worker": 0, "max": count}}


def turned(generator: random.Random, rollout: int, version: int, *, parent: int | None = None) -> Event:
    return {"turn_finished": {"rollout": rollout, "turn": turn(generator, version, parent)}}


def finished(rollout: int, reward: float, error: str | None = None) -> Event:
    trace = {"session": "", "trainable": True, "ok": error is None, "reward": reward, "metrics": {}}
    trace |= {"stop_condition": None, "truncated": False}
    told = None if error is None else {"kind": "environment", "message": error}
    outcome = {"ok": error is None, "traces": [trace], "error": told}
    return {"rollout_finished": {"rollout": rollout, "worker": 0, "outcome": outcome}}


def trained(request: int, step: int) -> Iterator[Event]:
    """The step is cut, and its weights are there."""
    yield {"batch_requested": {"request": request, "step": step, "rank": 0}}
    yield {"weights_published": {"version": step, "manifest": "m", "digest": str(step)}}
    yield {"engine_proved": {"engine": 0, "version": step}}


def turn(generator: random.Random, version: int, parent: int | None = None) -> Event:
    ids = generator.choices(range(90), k=PROMPT + SAMPLED)
    digest = generator.randbytes(16)
    return {
        "session": "",
        "parent": parent,
        "fork": "first_turn" if parent is None else None,
        "prompt_suffix": struct.pack(f"<{PROMPT}I", *ids[:PROMPT]),
        "sampled": struct.pack(f"<{SAMPLED}I", *ids[PROMPT:]),
        "logprobs": struct.pack(f"<{SAMPLED}f", *(-generator.expovariate(2) for _ in range(SAMPLED))),
        "versions": [{"version": version, "n_tokens": SAMPLED}],
        "temperature": 1.0,
        "finish": "stop",
        "start_digest": digest,
        "context_digest": digest,
        "answer": {"said": digest, "reasoning": None},
        "request_digest": generator.randbytes(16),
        "request": 1,
        "choice": 0,
    }


def write_summary(output: Path, code: int, reason: str, **others: Any) -> None:
    """As a launcher leaves it at the end."""
    (output / "run").mkdir(exist_ok=True)
    content = {"exit_code": code, "reason": reason, "wall_s": 34.2, **others}
    (output / "run/summary.json").write_text(json.dumps(content))
