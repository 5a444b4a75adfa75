"""What a server shows of the past: losses over steps and the last samples for its page, in memory and bounded; and a
file of all steps, for `primerl run metrics`."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("primerl.tinker")

MOST_POINTS = 2000
"""Points of a curve; with more every other one is dropped."""
MOST_SAMPLES = 24
SHOWN_PROMPT, SHOWN_SAMPLE = 256, 512
"""Tokens that are shown: the last of a prompt, the first of a sample."""


@dataclass
class Curve:
    x: list[int] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        if len(self.x) >= MOST_POINTS:
            del self.x[::2], self.y[::2]
        self.x.append(step)
        self.y.append(value)


class StepLines:
    """A line of JSON for each optim_step. Used by one thread at a time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_whole = False

    def add(self, client: str, step: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        """A step that was made is not failed by a disk that is full."""
        own = {name.partition(":")[0]: value for name, value in metrics.items()}
        line = {"client": client, "step": step, "loss": loss, **own, "timestamp": time.time()}
        try:
            if not self._is_whole:
                self._end_whole()
            with self._file.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
            self._is_whole = True
        except OSError as error:
            self._is_whole = False
            log.warning("step %d of %s is not in %s: %s", step, client, self._file, error)

    def _end_whole(self) -> None:
        """Without the half line of a server that was killed, or whose disk was full."""
        if self._file.is_file():
            with self._file.open("rb+") as file:
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)


@dataclass(frozen=True)
class Sample:
    at: float
    """Seconds since 1970."""
    sampler: str
    prompt: list[int]
    token_ids: list[int]
    of: int
    """Samples of its request, of which it is the first."""
    stopped: bool
    logprob: float
    """Mean of its tokens, nats."""


class Samples:
    """The first sample of each of the last requests."""

    def __init__(self) -> None:
        self._kept: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def add(self, sampler: str, prompt: Sequence[int], choices: Sequence[Mapping[str, Any]]) -> None:
        """`choices`: as engines give them, at least one."""
        first = choices[0]
        logprobs = [token["logprob"] for token in first["logprobs"]["content"]]
        mean = sum(logprobs) / max(1, len(logprobs))
        is_stopped = first["finish_reason"] == "stop"
        ids = list(first["token_ids"])
        self._kept.append(Sample(time.time(), sampler, list(prompt), ids, len(choices), is_stopped, mean))

    def described(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The newest first."""
        return [
            {
                "at": one.at,
                "sampler": one.sampler,
                "prompt": tokenizer.decode(one.prompt[-SHOWN_PROMPT:], skip_special_tokens=False),
                "prompt_tokens": len(one.prompt),
                "text": tokenizer.decode(one.token_ids[:SHOWN_SAMPLE], skip_special_tokens=False),
                "tokens": len(one.token_ids),
                "of": one.of,
                "stopped": one.stopped,
                "mean_logprob": one.logprob,
            }
            for one in reversed(self._kept)
        ]
