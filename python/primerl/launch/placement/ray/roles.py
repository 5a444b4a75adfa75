"""A role that was started on Ray's nodes, as the launcher sees it: a part of it on each of its nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from primerl.forking.exit_status import NOT_KNOWN
from primerl.launch.placement.protocol import Process


@dataclass(slots=True)
class Part:
    key: str
    seat: str
    node: str
    """Its address."""
    pid: int | None = None
    code: int | None = None
    failure: str | None = None
    lost: str | None = None
    cpu_s: float = 0.0

    @property
    def ended(self) -> bool:
        return self.code is not None or self.failure is not None


class Started:
    """Its parts, and how it ends: as the first part that ended badly."""

    def __init__(self, process: Process, parts: Sequence[Part]) -> None:
        self.process = process
        self.parts = list(parts)
        self.first_bad: Part | None = None

    def hear(self, part: Part, line: str | None) -> str | None:
        """What to note of a keeper's message; None of its line is its end."""
        if line is None:
            return self.lose(part, "its keeper has ended without a report")
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            return line.rstrip()
        if "started" in message:
            part.pid = message["started"]
            if part is self.parts[0]:
                self.process.pid = part.pid
            return f"process {part.pid} was started"
        if "exited" in message:
            part.code, part.cpu_s = message["exited"], message["cpu_s"]
        elif "failed" in message:
            part.failure = message["failed"]
        else:
            return None
        return self._ended(part)

    def lose(self, part: Part, why: str) -> str | None:
        if part.ended:
            return None
        if part.pid is None:
            part.failure = f"on node {part.node}: {why}"
        else:
            part.code, part.lost = NOT_KNOWN, f"was lost on node {part.node}: {why}"
        return self._ended(part)

    def _ended(self, part: Part) -> str | None:
        if self.first_bad is None and (part.failure is not None or part.code):
            self.first_bad = part
        if not all(one.ended for one in self.parts):
            return None
        bad, process = self.first_bad, self.process
        process.cpu_s = sum(one.cpu_s for one in self.parts)
        if bad is None:
            process.code = 0
        elif bad.failure is not None:
            process.failure = bad.failure
        else:
            process.code, process.lost = bad.code, bad.lost
        return process.describe_end()
