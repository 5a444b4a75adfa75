"""`run/summary.json`: what a session of the launcher took, for `primerl report`."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from primerl.config import resolve
from primerl.launch.processes import Process

FILE = Path("run") / "summary.json"


def times(began: float, training_began: float | None) -> dict[str, float]:
    now = time.monotonic()
    return {
        "wall_s": now - began,
        # Until every part had reported, and from then on.
        "start_s": (training_began or now) - began,
        "run_s": now - (training_began or now),
    }


def processor(processes: Iterable[tuple[str, Process]]) -> dict[str, Any]:
    """CPU seconds, of pairs of kind and process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "processes": {
            process.name: {"kind": kind, "code": process.code, "cpu_s": process.cpu_s} for kind, process in processes
        },
        "launcher_cpu_s": own.ru_utime + own.ru_stime,
    }


def write(folder: Path, summary: dict[str, Any], *, has_run: bool) -> None:
    """A session in which nothing ran leaves the summary of the one before, which tells of the run. Raises OSError."""
    file = folder / FILE
    if has_run or not file.is_file():
        resolve.write_text(file, json.dumps(summary, indent=1) + "\n")
