"""What has to be alike on the nodes of a run: versions, and the time within bounds. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Mapping

MOST_SKEW_S = 30.0
"""A clock that differs by less is not worth a message."""


def versions() -> dict[str, str]:
    """Those of this process."""
    from primerl._core import __version__

    return {"primerl": __version__, "python": sys.version.split()[0]}


def difference(node: str, found: Mapping[str, object], own: Mapping[str, str]) -> str | None:
    """Why processes of the run cannot be started on the node, whose versions are `found`."""
    for name, version in own.items():
        if found.get(name) != version:
            return f"{node} has {name} {found.get(name)}, and the launcher's has {version}; install the same"
    return None


def skew(node: str, ahead_s: float) -> str | None:
    """The message about a node whose clock is that much ahead of the launcher's (or behind: below 0), if it is far."""
    if abs(ahead_s) < MOST_SKEW_S:
        return None
    how = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of {node} is {abs(ahead_s):.0f} s {how} this one's: the run does not depend on it, but times in "
        "logs and of files do not agree; synchronise the clocks (NTP)"
    )
