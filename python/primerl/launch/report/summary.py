"""`run/summary.json`: what this session of the launcher took, and all before it in the same folder."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from primerl.config.process_files import files
from primerl.forking.exit_status import NOT_KNOWN
from primerl.launch.placement.protocol import Process
from primerl.process.redaction import redact, redacted

FILE = Path("run") / "summary.json"
# Sums over earlier sessions, under their name in the summary. One whose launcher was killed left none.
BEFORE = "before"
SAMPLED_BEFORE = "sampled_before"
"""The run's count of sampled tokens when the session began."""
SAMPLED_BY_RUN = "sampled_by_run"
SAMPLED_IN_SESSIONS = "sampled_in_sessions"
"""In those whose times are summed up: without sessions that left no summary."""


def contents(
    code: int,
    reason: str,
    *,
    began: float,
    training_began: float | None,
    processes: Iterable[tuple[str, Process]],
    gpus: int,
    before: Mapping[str, int],
    status: dict[str, Any],
) -> dict[str, Any]:
    """What the session that ends now took, without the user's secrets. `processes`: with the kind of each; `before`:
    of `sampled_before`; `status`: the orchestrator's last."""
    now = time.monotonic()
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "exit_code": code,
        "reason": redact(reason),
        "wall_s": now - began,
        # Until every part had reported, and from then on.
        "start_s": (training_began or now) - began,
        "run_s": now - (training_began or now),
        "processes": {
            process.name: {
                "kind": kind,
                "code": None if process.code == NOT_KNOWN else process.code,
                "cpu_s": process.cpu_s,
            }
            for kind, process in processes
        },
        "launcher_cpu_s": own.ru_utime + own.ru_stime,
        "gpus": gpus,
        **before,
        # What an environment says of a failure may hold a secret of its own.
        "status": redacted(status),
    }


def sampled_before(status: dict[str, Any]) -> dict[str, int]:
    """`status`: of the orchestrator, before anything is sampled."""
    counted = status.get("run", {}).get("sampled_tokens")
    return {} if counted is None else {SAMPLED_BEFORE: counted}


def write(folder: Path, summary: dict[str, Any], *, has_run: bool) -> None:
    """A session in which nothing ran keeps the previous session's summary, which describes the run, unless nothing ran
    then either. Raises OSError."""
    file = folder / FILE
    if has_run or not file.is_file() or _ran_nothing(file):
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError, AttributeError
        ):  # damaged: as if there were none
            summary = {**summary, BEFORE: sums(json.loads(file.read_bytes()))}
        files.write_text(file, json.dumps(summary, indent=1) + "\n")


def _ran_nothing(file: Path) -> bool:
    """Whether the session that has left this summary failed at its start."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        found = json.loads(file.read_bytes())
        return bool(found["exit_code"] != 0 and found["run_s"] == 0)
    return False


def sums(summary: dict[str, Any]) -> dict[str, float]:
    """Over a session and those before it: how many, their seconds, tokens sampled. Raises what a damaged one raises."""
    cpu = {name: process["cpu_s"] for name, process in summary.get("processes", {}).items()}
    before = summary.get(BEFORE, {})
    sampled, by_run = _sampled(summary, before)
    own = {
        "sessions": 1,
        **{name: summary[name] for name in ("wall_s", "start_s", "run_s")},
        "sampled_tokens": sampled,
        SAMPLED_IN_SESSIONS: _sampled_here(summary),
        "orchestrator_cpu_s": cpu.get("orchestrator", 0.0),
        "cpu_s": sum(cpu.values()) + summary.get("launcher_cpu_s", 0.0),
        # GPUs that the run's processes were given, busy or not. Earlier versions did not note them.
        "gpu_s": summary["wall_s"] * summary.get("gpus", 0),
    }
    before = {SAMPLED_IN_SESSIONS: before.get("sampled_tokens", 0), **before}
    found = {name: value + before.get(name, 0) for name, value in own.items()}
    return found if by_run is None else {**found, SAMPLED_BY_RUN: by_run}


def _sampled_here(summary: dict[str, Any]) -> float:
    status, began = summary.get("status", {}), summary.get(SAMPLED_BEFORE)
    counted = status.get("run", {}).get("sampled_tokens")
    if counted is None or began is None:
        return status.get("tokens", {}).get("sampled", 0)  # type: ignore[no-any-return]
    return max(0, counted - began)  # type: ignore[no-any-return]


def _sampled(summary: dict[str, Any], before: dict[str, float]) -> tuple[float, float | None]:
    """Tokens that were sampled since the last summary, and the run's own count of them all at its end.

    That count outlives every process, so it has what sessions that left no summary have sampled. It is smaller than at
    the last summary in a run that has gone back to a checkpoint.
    """
    status = summary.get("status", {})
    counted = status.get("run", {}).get("sampled_tokens")
    known = before.get(SAMPLED_BY_RUN)
    # Earlier versions counted since the orchestrator's last start; or it never answered.
    if counted is None:
        return status.get("tokens", {}).get("sampled", 0), known
    began = summary.get(SAMPLED_BEFORE)
    if known is None:  # the first session, or the first after those of earlier versions
        known = 0 if not before else counted if began is None else began
    return max(0, counted - (known if began is None else min(began, known))), counted
