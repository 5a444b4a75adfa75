"""What a launcher says once of what the orchestrator tells it: who is blocked, why the first rollouts failed, and which
environments rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primerl.launch.report import status as orchestrator_status


class Remarks:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._blocked: set[Any] = set()  # workers that were reported as blocked
        # Environments and kinds of error; those that are there at the first look are of an earlier start.
        self._failed: set[tuple[str, str]] | None = None
        self._resting: set[str] = set()

    def look(self, status: dict[str, Any]) -> None:
        self._look_for_blocked(status.get("workers", []))
        self._look_for_errors(status.get("environments", []))
        self._look_for_rests(status.get("environments", []))

    def _look_for_blocked(self, workers: list[dict[str, Any]]) -> None:
        blocked = {worker["worker"]: worker for worker in workers if worker.get("blocked")}
        for number, worker in blocked.items():
            if number not in self._blocked:
                self._say(blocked_in_words(worker))
        self._blocked = set(blocked)

    def _look_for_errors(self, environments: list[dict[str, Any]]) -> None:
        found = {
            (environment["name"], kind): first
            for environment in environments
            for kind, first in environment.get("first_errors", {}).items()
        }
        known = set(found) if self._failed is None else self._failed
        for (name, kind), first in found.items():
            if (name, kind) not in known:
                self._say(
                    f"the first rollout of {name!r} has failed by an error of kind {kind}: {first['message']} (rollout "
                    f"{first['rollout']}, example {first['example']})"
                )
        self._failed = known | set(found)

    def _look_for_rests(self, environments: list[dict[str, Any]]) -> None:
        resting = {
            environment["name"]: environment["rests"] for environment in environments if environment.get("rests")
        }
        for name, why in resting.items():
            if name not in self._resting:
                self._say(f"warning: environment {name!r} is paused: {why}. The other environments continue")
        for name in sorted(self._resting - set(resting)):
            self._say(f"environment {name!r} is used again")
        self._resting = set(resting)


def blocked_in_words(worker: dict[str, Any]) -> str:
    """`worker env_task_0 is blocked by its environment for 12 s (task/rewards.py:28)`, and what that means."""
    block = worker["blocked"]
    at = f" ({block['at']})" if block.get("at") else ""
    of = "" if block.get("rollout") is None else f", in rollout {block['rollout']}"
    name = orchestrator_status.own_name(str(worker.get("name", worker["worker"])))
    return (
        f"worker {name} is blocked by its environment for {float(block['since_s']):.0f} s{at}{of}: it gets no "
        f"rollouts, none of its {worker.get('running', 0)} proceeds, and it is started again when the time of one is "
        "up; all stacks are in its log"
    )
