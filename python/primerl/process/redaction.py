"""Secrets of the user's, kept out of what primerl itself prints and writes. Standard library only.

Only values that this process knows can be found: code that reads one notes it here. An env worker is given the names of
the variables of its environment are secrets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

SHORTEST = 6
"""Characters; a shorter value is found in half the words of a log, and would make it unreadable."""
MARK = "<secret>"
VARIABLE = "PRIMERL_SECRET_NAMES"
"""To an env worker: names of the variables that are secrets, with commas between them."""
_known: set[str] = set()


def note(values: Iterable[str]) -> None:
    _known.update(forms(values))


def note_own() -> None:
    """The secrets in this process's environment."""
    names = filter(None, os.environ.get(VARIABLE, "").split(","))
    note(os.environ[name] for name in names if name in os.environ)


def forms(values: Iterable[str]) -> list[str]:
    """What is to be hidden for these values: as they are, as they are within JSON, and each line of those that have
    several. The longest first, since one may be within another."""
    found: set[str] = set()
    for value in values:
        found |= {value, json.dumps(value)[1:-1], repr(value)[1:-1], *value.splitlines()}
    return sorted((form for form in found if len(form) >= SHORTEST), key=len, reverse=True)


def redact(text: str) -> str:
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MARK)
    return text


def redacted(value: Any) -> Any:
    """A JSON value with every text in it redacted; numbers are no secrets."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redacted(inner) for key, inner in value.items()}
    return [redacted(inner) for inner in value] if isinstance(value, list) else value
