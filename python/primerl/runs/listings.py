"""Which example of one run is which of another: their seeds order the same examples differently.

`run/listings.json` has the key of each example in the order in which the run's env workers list them; the orchestrator
writes it when the first one registers.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path("run") / "listings.json"


def keys_of(folder: Path, environment: str) -> list[str] | None:
    """Keys by number of the first examples; None where there are none, as in runs of earlier versions."""
    try:
        for _, listing in json.loads((folder / FILE).read_text(encoding="utf-8")):
            if listing.get("environment") == environment and listing.get("keys"):
                return [str(key) for key in listing["keys"]]
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
    """The number of the example with this key; None where the run has no keys.

    Raises UnknownExampleError.
    """
    keys = keys_of(folder, environment)
    if keys is None:
        return None
    try:
        return keys.index(key)
    except ValueError:
        raise UnknownExampleError(f"this example is not among the first {len(keys)} of its {environment!r}") from None
