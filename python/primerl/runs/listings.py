"""Which example of one run is which of another: their seeds order the same examples differently.

`run/listings.json` has the key of each example in the order in which the run's env workers list them; the orchestrator
writes it when the first one registers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from primerl.envs.listing import MOST_PAIRED

FILE = Path("run") / "listings.json"


@dataclass(frozen=True, slots=True)
class Listed:
    """What is known of the examples of one environment of a run."""

    keys: list[str]
    """By number, of the first ones."""
    count: int | None
    """None where more than the first ones are there, in runs of earlier versions."""

    def check(self, environment: str, number: int) -> None:
        """Raises UnknownExampleError where there is no such number."""
        if self.count is not None and number >= self.count:
            there = f"{self.count:,}, numbered from 0 to {self.count - 1}" if self.count else "none"
            raise UnknownExampleError(f"there is no example {number}: environment {environment!r} has {there}")


def listed(folder: Path, environment: str) -> Listed | None:
    """None where nothing is known, as in runs of earlier versions."""
    try:
        for _, listing in json.loads((folder / FILE).read_text(encoding="utf-8")):
            if listing.get("environment") == environment and listing.get("keys"):
                keys, count = [str(key) for key in listing["keys"]], listing.get("examples")
                return Listed(keys, count if isinstance(count, int) else len(keys) if len(keys) < MOST_PAIRED else None)
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    return None


def environments_of(folder: Path) -> list[str]:
    """Names of the environments whose workers have registered, those of evaluations too; empty where they are not
    known, as in runs of earlier versions."""
    try:
        listings = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return sorted({str(listing["environment"]) for _, listing in listings if listing.get("environment")})
    except (OSError, ValueError, TypeError, AttributeError):
        return []


class UnknownExampleError(Exception):
    """The run does not have the example; the message says which."""


def number_in(folder: Path, environment: str, key: str) -> int | None:
    """The number of the example with this key; None where nothing is known of the run's examples.

    Raises UnknownExampleError.
    """
    known = listed(folder, environment)
    if known is None:
        return None
    try:
        return known.keys.index(key)
    except ValueError:
        raise UnknownExampleError(
            f"this example is not among the first {len(known.keys)} of its {environment!r}"
        ) from None
