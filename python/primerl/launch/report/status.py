"""What the orchestrator says about itself (`GET /status`), and what is missing or stuck in it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from primerl.net.requests import UnansweredError, ask, tell

ANSWER_S = 3.0
ENDED_EARLIER = "ended with the session that had started it"


def fetch(url: str) -> dict[str, Any] | None:
    """The status, or None when the orchestrator did not answer in time."""
    try:
        code, content = ask(url, "/status", within_s=ANSWER_S)
    except UnansweredError:
        return None
    return content if code == 200 else None


def finished(status: dict[str, Any]) -> bool:
    return bool(status.get("run", {}).get("finished"))


def waits(status: dict[str, Any]) -> list[str]:
    """`trainer waits for 2 of 8 groups ready for step 13 (4 s)`, in the order of who waits for whom."""
    return [
        # For an engine that is down, the orchestrator reports what it does instead.
        f"{who} does not serve: {what} ({since:.0f} s)" if is_engine else f"{who} waits for {what} ({since:.0f} s)"
        for since, who, what, is_engine in _waits(status)
    ]


def longest_wait(status: dict[str, Any], least_s: float) -> str | None:
    """In a few words what holds the run up: not a usual wait (a worker that has nothing to do, a rollout
    for its answer), and no engine while another serves (one that left may never come back)."""
    others_serve = any(engine.get("version") is not None for engine in status.get("engines", []))
    unusual = {**status, "waits": [wait for wait in status.get("waits", []) if not wait.get("usual")]}
    for since, who, what, is_engine in sorted(_waits(unusual), reverse=True):
        if since < least_s or (is_engine and others_serve):
            continue
        if is_engine:
            return f"no engine serves ({since:.0f} s)"
        return f"{who} waits for {what} ({since:.0f} s)"
    return None


def _waits(status: dict[str, Any]) -> list[tuple[float, str, str, bool]]:
    """Since when, who, for what, and whether it is an engine that does not serve."""
    return [
        (float(wait.get("since_s") or 0.0), wait["who"], wait["for"], "engine" in wait)
        for wait in status.get("waits", [])
    ]


def missing(status: dict[str, Any], environments: list[str], *, trainer: bool = True) -> list[str]:
    """Which parts have not reported yet. `trainer`: whether one of the run's own is among them."""
    parts = []
    if not any(engine.get("version") is not None for engine in status.get("engines", [])):
        known = status.get("engines", [])
        whats = "".join(f"; {engine['url']}: {engine['doing']}" for engine in known if not engine.get("healthy", True))
        parts.append(
            f"no inference engine has proved its weights{whats}" if known else "no inference engine has joined"
        )
    present = {worker.get("environment") for worker in status.get("workers", [])}
    refused = {worker["environment"]: f": {worker['reason']}" for worker in status.get("refused_workers", [])}
    absent = [name for name in environments if name not in present]
    parts += [f"no env worker of {name!r} has registered{refused.get(name, '')}" for name in absent]
    if trainer and status.get("trainer", {}).get("last_seen_s") is None:
        parts.append("the trainer has not reported")
    return parts


def not_joined(status: dict[str, Any], environments: list[str]) -> list[str]:
    """Environments whose workers run on other machines: which of them the run waits for."""
    present = {worker.get("environment") for worker in status.get("workers", [])}
    refused = {worker["environment"]: f" ({worker['reason']})" for worker in status.get("refused_workers", [])}
    return [
        f"no env worker of {name!r} has joined{refused.get(name, '')}" for name in environments if name not in present
    ]


def own_name(name: str) -> str:
    """What people know an env worker by, of the name that it gave: without its process id."""
    own, _, pid = name.rpartition(":")
    return own if own and pid.isdigit() else name


def worker_pids(status: dict[str, Any]) -> set[int]:
    """Process ids of the registered env workers, which end their names."""
    ends = [str(worker.get("name", "")).rpartition(":")[2] for worker in status.get("workers", [])]
    return {int(end) for end in ends if end.isdigit()}


def sign_off(url: str, worker_name: str, reason: str) -> list[str] | None:
    """Reports that an env worker has ended, and how ("exited with code 3"): its rollouts are handed out again now, or,
    if no orchestrator answers, after `timeouts.worker_s`. Returns what it ran, `rollout 12 (example 5)`; None where
    the orchestrator does not know it."""
    status = fetch(url) or {}
    for worker in status.get("workers", []):
        if worker.get("name") == worker_name:
            with contextlib.suppress(UnansweredError):
                return _leave(url, worker["worker"], reason)
            return []
    return None


def sign_off_earlier(url: str, names: Collection[str]) -> None:
    """Reports, before any env worker is started, that those of these names ended with the session of the run that had
    started them: the orchestrator has read in its journal that they were registered, and would wait for them for
    `timeouts.worker_s`. `names`: without process ids. Where it does not answer in time, it finds out by itself."""
    with contextlib.suppress(UnansweredError):
        for worker in (fetch(url) or {}).get("workers", []):
            if own_name(str(worker.get("name", ""))) in names:
                _leave(url, worker["worker"], ENDED_EARLIER)


def _leave(url: str, worker: int, reason: str) -> list[str]:
    """Returns what it ran. Raises UnansweredError."""
    _, answer = tell(url, "/envs/leave", {"worker": worker, "reason": reason}, within_s=ANSWER_S)
    return [f"rollout {one['rollout']} (example {one['example']})" for one in answer.get("rollouts", [])]


def trainer_starts(url: str, within_s: float | None = None, why: str = "") -> None:
    """Says that the trainer is being started: one that a launcher of this run had started before is gone. `within_s`:
    of one that is started again, how long that may take; `why` it was. Without an answer, the orchestrator finds out by
    itself, and has the new one wait until then."""
    body = {"why": why} if within_s is None else {"within_s": within_s, "why": why}
    with contextlib.suppress(UnansweredError):
        tell(url, "/trainer/starting", body, within_s=ANSWER_S)


@dataclass(slots=True)
class Progress:
    """When something last moved. Pure: times are given."""

    since: float = 0.0
    marks: tuple[Any, ...] = field(default=())

    def moved(self, status: dict[str, Any], now: float) -> bool:
        """Whether anything a run is for has happened since the last call: tokens, ended rollouts, steps."""
        rollouts = status.get("rollouts", {})
        marks = (
            status.get("run", {}).get("step"),
            status.get("run", {}).get("policy_version"),
            status.get("tokens", {}).get("sampled"),
            *(rollouts.get(key) for key in ("trained", "filtered", "stale", "failed", "cancelled", "evaluated")),
        )
        if marks == self.marks:
            return False
        self.marks, self.since = marks, now
        return True
