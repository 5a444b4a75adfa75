"""Evaluations whose scores are less than they seem: closed before all of their rollouts had ended, so that they are of
the fast ones, or with rollouts that failed, which count as 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

FEW_FAILED = 0.05
"""Share of the rollouts."""


class Incomplete:
    """Tells of each once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[tuple[str, Any]] | None = None

    def look(self, reports: Iterable[dict[str, Any]]) -> None:
        """`reports`: all there are, as in evals.jsonl. Those of the first look were told by the start before."""
        found = {_place(report): report for report in reports if report.get("complete") is False or has_failed(report)}
        known = self._told
        self._told = set(found)
        for place, report in found.items():
            if known is not None and place not in known:
                self._say(told(report))


def _place(report: dict[str, Any]) -> tuple[str, Any]:
    return str(report["environment"]), report.get("version", report.get("policy_at_the_time"))


def told(report: dict[str, Any]) -> str:
    name, version = _place(report)
    if report.get("complete") is not False:
        kinds = ", ".join(f"{count} by errors of kind {kind}" for kind, count in report.get("errors", {}).items())
        return (
            f"warning: in the evaluation of {name!r} at version {version}, {report['failed']} of {report['rollouts']} "
            f"rollouts failed{f' ({kinds})' if kinds else ''} and count as 0: its scores say little of the policy; "
            "logs/envs/eval has the tracebacks"
        )
    return (
        f"warning: the evaluation of {name!r} at version {version} was closed with {measured(report)} rollouts: its "
        "scores are of those that had ended, and not to be compared with others; orchestrator.timeouts.evaluation_s "
        "and evaluation_progress_s say how long it may take"
    )


def has_failed(report: dict[str, Any]) -> bool:
    return bool(report.get("failed", 0) > FEW_FAILED * report.get("rollouts", 0))


def measured(report: dict[str, Any]) -> str:
    """`32 of 72`"""
    return f"{report['rollouts']} of {report['expected']}"


def mark(report: dict[str, Any]) -> str:
    """What is added to the version of an evaluation that is not complete: `, 32 of 72 rollouts`."""
    return f", {measured(report)} rollouts" if report.get("complete") is False else ""
