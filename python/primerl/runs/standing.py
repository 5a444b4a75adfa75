"""How a run stands, from what can be seen: who holds its folder's lock, and how its last launcher ended."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.runs import served
from primerl.runs.registry import SCRIPT, Run
from primerl.train.checkpoint.files import last_line

PENDING, RUNNING, STOPPED, FAILED, COMPLETED = "PENDING", "RUNNING", "STOPPED", "FAILED", "COMPLETED"
WITHOUT_ORCHESTRATOR = ("sft", "inference")
"""Kinds of runs that have begun once their folder is in use."""
LONGEST = 300
"""Characters of a part of a reason in one line."""
INTERRUPTED = (129, 130, 143)
"""A launcher says 130 whatever it was interrupted by; a fine-tuning 128 and the signal's number."""


@dataclass(frozen=True, slots=True)
class Standing:
    status: str
    reason: str
    """What is wrong with the run; empty if nothing is."""
    step: int | None
    """Steps trained; None where the folder, which knows it, is gone, and of a server."""


def standing(run: Run) -> Standing:
    from primerl.launch.slurm import jobs
    from primerl.launch.supervise.lock import in_use

    folder = run.output_dir
    # A server's clients count steps of their own.
    step = None if run.kind == served.KIND else int(last_line(folder / "metrics.jsonl").get("step", 0))
    try:
        used = in_use(folder)
    except OSError as error:
        return Standing(FAILED, f"its folder cannot be looked at: {error}", step)
    in_queue = jobs.queued(folder)
    if used or (in_queue is not None and not in_queue[1].is_waiting):
        return Standing(RUNNING if run.kind in WITHOUT_ORCHESTRATOR or _has_started(run) else PENDING, "", step)
    if in_queue is not None:
        job, found = in_queue
        return Standing(PENDING, f"job {job.id} is {found.told()}", step)
    if not folder.is_dir():
        return Standing(_by_code(run.exit_code), f"its folder {folder} is gone", None)
    code, reason = run.exit_code, ""
    summary = summary_of(run)
    if summary is not None:
        code = summary.get("exit_code") if code is None else code
        reason = str(summary.get("reason", "")).strip()
    if code is None:
        return _without_code(run, step)
    reason = reason or (f"it ended with exit code {code}; see its log" if code else "")
    return Standing(_by_code(code), reason if code else "", step)


def _without_code(run: Run, step: int | None) -> Standing:
    """A run whose launcher has noted no end: it was killed, or its job of Slurm never began, or waits where the list of
    jobs does not have it."""
    from primerl.launch.slurm import jobs

    job = jobs.noted(run.output_dir)
    found = None if job is None else jobs.state(job)
    if found is not None and found.state == jobs.CANCELLED:
        return Standing(STOPPED, "", step)
    if found is not None and job is not None and not found.is_over:
        reason = "" if found.state in jobs.ACTIVE else f"job {job.id} is {found.told()}"
        begun = not found.is_waiting and (run.kind in WITHOUT_ORCHESTRATOR or _has_started(run))
        return Standing(RUNNING if begun else PENDING, reason, step)
    ended = "" if found is None or job is None else f"job {job.id} is {found.told()}: "
    if run.form == SCRIPT:
        return Standing(FAILED, f"{ended}its training script was killed; the same script resumes it", step)
    return Standing(FAILED, f"{ended}its launcher was killed; `primerl run resume` continues it", step)


def in_a_line(reason: str) -> str:
    """What failed and why; further lines are the end of a log."""
    first = reason.strip().partition("\n")[0]
    return first if len(first) <= LONGEST else f"{first[:LONGEST]} ..."


def summary_of(run: Run) -> dict[str, Any] | None:
    """`run/summary.json`, where it is of the run's last launcher and no earlier one."""
    file = run.output_dir / "run" / "summary.json"
    try:
        written = file.stat()
        if written.st_mtime < run.session_started:
            return None
        found = _read_summary(file, (written.st_ino, written.st_mtime_ns, written.st_size))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@functools.lru_cache(maxsize=256)
def _read_summary(file: Path, _version: tuple[int, int, int]) -> Any:
    """A page that is looked at asks every few seconds. Callers do not change it."""
    return json.loads(file.read_text(encoding="utf-8"))


def _has_started(run: Run) -> bool:
    """Whether this launcher's orchestrator, or this server of the Tinker API, listens."""
    file = served.FILE if run.kind == served.KIND else Path("run") / "orchestrator.json"
    try:
        return (run.output_dir / file).stat().st_mtime >= run.session_started
    except OSError:
        return False


def _by_code(code: int | None) -> str:
    if code == 0:
        return COMPLETED
    return STOPPED if code in INTERRUPTED else FAILED
