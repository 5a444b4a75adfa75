"""What a server's page shows of the past: losses over steps, and the last samples. In memory, and bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
