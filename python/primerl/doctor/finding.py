"""What a check found. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    about: str
    level: Level
    """`note`: some runs are slower, or lack something; `problem`: runs, or most of them, do not start."""
    found: str
    advice: str = ""
    """What it means for a run, and what to do; empty where there is nothing to say."""


def ok(about: str, found: str, advice: str = "") -> Finding:
    return Finding(about, "ok", found, advice)


def note(about: str, found: str, advice: str) -> Finding:
    return Finding(about, "note", found, advice)


def problem(about: str, found: str, advice: str) -> Finding:
    return Finding(about, "problem", found, advice)


def amount(count: float) -> str:
    """Bytes, for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
