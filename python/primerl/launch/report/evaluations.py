"""What a launcher prints of each evaluation that has ended: its scores, and where they are less than they seem: of the
fast rollouts only, or with rollouts that failed, which count as 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

FEW_FAILED = 0.05
"""Share of the rollouts."""


class Evaluated:
    """Tells of each evaluation once."""

    def __init__(self, say: Callable[[str], None], before: Iterable[dict[str, Any]] = ()) -> None:
        """`before`: reports as in evals.jsonl, of which an earlier start has told."""
        self._say = say
        self._told = {_place(report) for report in before}

    def look(self, reports: Iterable[dict[str, Any]]) -> None:
        """`reports`: all there are, or the last ones."""
        for report in reports:
            place = _place(report)
            if place not in self._told:
                self._told.add(place)
                self._say(told(report) if report.get("complete") is False else scores(report))
                if has_failed(report):
                    self._say(failures(report))


def _place(report: dict[str, Any]) -> tuple[str, Any]:
    return str(report["environment"]), report.get("version", report.get("policy_at_the_time"))


def scores(report: dict[str, Any]) -> str:
    """`evaluation of 'a' at version 20: reward 0.531 (0.490 to 0.572), pass@4 0.800; 128 rollouts, 3 failed`"""
    name, version = _place(report)
    reward = report.get("mean_reward")
    measured = ["no reward" if reward is None else f"reward {reward:.3f}{_interval(report)}"]
    measured += [
        f"{key} {value:.3f}" for key, value in report.items() if re.fullmatch(r"pass@\d+", key) and value is not None
    ]
    failed = f", {report['failed']} failed" if report.get("failed") else ""
    return f"evaluation of {name!r} at version {version}: {', '.join(measured)}; {report['rollouts']} rollouts{failed}"


def _interval(report: dict[str, Any]) -> str:
    """The 95 % interval of the mean reward; of one example there is none."""
    low = next((key for key in report if re.fullmatch(r"avg@\d+/low", key)), "")
    high = low.replace("/low", "/high")
    if report.get(low) is None or report.get(high) is None:
        return ""
    return f" ({report[low]:.3f} to {report[high]:.3f})"


def told(report: dict[str, Any]) -> str:
    name, version = _place(report)
    return (
        f"warning: the evaluation of {name!r} at version {version} was closed with {measured(report)} rollouts: its "
        "scores are of those that had ended, and not to be compared with others; orchestrator.timeouts.evaluation_s "
        "and evaluation_progress_s say how long it may take"
    )


def has_failed(report: dict[str, Any]) -> bool:
    return bool(report.get("failed", 0) > FEW_FAILED * report.get("rollouts", 0))


def failures(report: dict[str, Any]) -> str:
    name, version = _place(report)
    kinds = ", ".join(f"{count} by errors of kind {kind}" for kind, count in report.get("errors", {}).items())
    return (
        f"warning: in the evaluation of {name!r} at version {version}, {report['failed']} of {report['rollouts']} "
        f"rollouts failed{f' ({kinds})' if kinds else ''} and count as 0: its scores say little of the policy; "
        "logs/envs/eval has the tracebacks"
    )


def measured(report: dict[str, Any]) -> str:
    """`32 of 72`"""
    return f"{report['rollouts']} of {report['expected']}"


def mark(report: dict[str, Any]) -> str:
    """What is added to the version of an evaluation that is not complete: `, 32 of 72 rollouts`."""
    return f", {measured(report)} rollouts" if report.get("complete") is False else ""
