"""Turns the files that a run writes into records. Each is collected once: a trainer that resumes from a checkpoint
trains steps again, which are not reported again."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

from primerl.config.schema.monitors import MonitorConfig
from primerl.monitors.extras import Extras
from primerl.monitors.records import Records, Tail

log = logging.getLogger(__name__)

NO_METRIC = {"environment", "version", "policy_at_the_time", "model", "metrics"}
"""Keys of a line of evals.jsonl that are no numbers of the evaluation."""


REST = 4.0
"""How long it leaves the journal alone, as a multiple of the time that reading it took."""


class Collector:
    """Not for several threads."""

    def __init__(self, config: MonitorConfig, records: Records) -> None:
        folder = Path(config.output_dir)
        self.records = records
        self.extras = Extras(config)
        self._metrics = Tail(folder / "metrics.jsonl")
        self._evaluations = Tail(folder / "evals.jsonl")
        self._step = -1
        self._evaluated: set[tuple[str, int]] = set()
        self._due: set[int] = set()
        self._rests_until = 0.0
        for record in records:
            if record.kind == "metrics":
                self._step = max(self._step, record.step)
                self._note_due(record.step)
            elif record.kind == "evaluation":
                self._evaluated.add((record.values["environment"], record.step))
            else:
                self._due.discard(record.step)

    def collect(self, *, hurry: bool = False) -> None:
        """Takes in what has been written since. Reading a long journal takes a while, so that most of the time is left
        to others, unless one is in a hurry. Raises OSError."""
        for line in self._metrics.lines():
            step = line.pop("step", None)
            if isinstance(step, int) and step > self._step:
                self.records.append("metrics", step, _numbers(line))
                self._step = step
                self._note_due(step)
        if self._due and (hurry or time.monotonic() >= self._rests_until):
            began = time.monotonic()
            for step in self.extras.make(sorted(self._due)):
                self.records.append("extras", step, {})
                self._due.discard(step)
            now = time.monotonic()
            self._rests_until = now + REST * (now - began)
        for line in self._evaluations.lines():
            environment, step = str(line.get("environment")), line.get("version", line.get("policy_at_the_time"))
            if isinstance(step, int) and (environment, step) not in self._evaluated:
                metrics = evaluation_metrics(environment, line)
                self.records.append("evaluation", step, {"environment": environment, "metrics": metrics})
                self._evaluated.add((environment, step))

    @property
    def is_behind(self) -> bool:
        """Whether samples or distributions are still missing."""
        return bool(self._due)

    def _note_due(self, step: int) -> None:
        if self.extras.are_due(step):
            self._due.add(step)


def evaluation_prefix(environment: str, line: dict[str, Any]) -> str:
    """The prefix of its metrics' names: `eval/<environment>/`, or `val/<training environment>/`."""
    return f"val/{line['validates']}/" if line.get("validates") else f"eval/{environment}/"


def evaluation_metrics(environment: str, line: dict[str, Any]) -> dict[str, float]:
    """`eval/<environment>/<name>`, of every number that the line has, however deep; of a validation, `val/` and the
    name of the training environment."""
    found: dict[str, float] = {}

    def add(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}/", value)
            elif _is_number(value):
                found[f"{prefix}{name}"] = float(value)

    prefix = evaluation_prefix(environment, line)
    add(prefix, {name: value for name, value in line.items() if name not in NO_METRIC})
    add(prefix, line["metrics"] if isinstance(line.get("metrics"), dict) else {})
    return found


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
