"""What a monitor is, and what is reported to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["finished", "failed", "interrupted", "crashed"]
"""How a run ended: `failed` where a process of it gave up, `crashed` where the launcher was killed."""


class RefusedError(Exception):
    """The service will not take it, now or later (a key it does not know, say): the monitor is given up."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that is reported to a monitor."""

    folder: Path
    """Its output_dir."""
    kind: Literal["rl", "sft"]
    name: str
    """The name of its folder."""
    model: str
    max_steps: int | None
    config: dict[str, Any]
    """The run's config, without keys."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the monitor has remembered, over restarts."""
    remember: Callable[..., None] = lambda **values: None
    """`remember(id="...")` puts values into `state`; they are on the disk when it returns."""
    say: Callable[..., None] = lambda **values: None
    """`say(url="...")`: for the launcher, which shows it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence that was trained."""

    environment: str
    example: int
    group: int
    rollout: int
    reward: float | None
    """None where its environment gave none."""
    advantage: float
    """Mean over the trained tokens."""
    prompt: str
    """Everything before the first token that is learnt, as the model saw it."""
    completion: str
    """The rest: what the model wrote, and in between what tools and users did."""
    turns: int
    tokens: int
    learnt_tokens: int
    staleness: int | None
    """Steps; None where a teacher wrote it."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of one step: each by itself, or counted."""

    edges: list[float]
    """`[bins + 1]`, ascending."""
    counts: list[int]
    """`[bins]`"""
    values: list[float] | None = None
    """Those of each sample; None of tokens, of which there are too many."""

    @classmethod
    def of(cls, values: list[float], bins: int = 32) -> Distribution:
        """The histogram of at least one value, in bins of one width. Raises ValueError where one is not finite."""
        import numpy

        low, high = float(numpy.min(values)), float(numpy.max(values))  # not a number where one value is none
        # Bins have to be wider than what is between two numbers: values that differ by less are as good as equal.
        narrowest = 4 * bins * float(numpy.spacing(max(abs(low), abs(high))))
        if high - low < narrowest:
            middle, half = (low + high) / 2, max(0.5, narrowest)
            low, high = middle - half, middle + half
        counts, edges = numpy.histogram(values, bins=bins, range=(low, high))
        return cls(edges.tolist(), counts.tolist(), values)


class Monitor:
    """Override what you need. An exception is logged, and the same call made again later, with growing pauses; a
    `RefusedError` gives the monitor up. One thread calls all of it, in the order of things.

    After a restart a call may come twice: it was answered, and the process died before that was on the disk.
    `self.number` is the same in both.
    """

    number: int = 0
    """Number of the call: counts up over the whole run, for services that know what they have."""

    def start(self, run: Run) -> int | None:
        """Before anything else, and again after a restart. Returns the number of the first thing the service does not
        have, where it knows; None: the cursor in the run's folder is right."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step, by name, as `metrics.jsonl` has them; or of an evaluation after that step."""

    def samples(self, step: int, samples: list[Sample]) -> None:
        """Some of what was trained in the step."""

    def distributions(self, step: int, distributions: dict[str, Distribution]) -> None:
        """`rewards`, `advantages`, `lengths`, `staleness` of the step's samples; `entropy` and `log_ratio` of its
        tokens."""

    def finish(self, status: Status, reason: str) -> None:
        """The run has ended, and everything has been reported. The same command may resume the run later."""
