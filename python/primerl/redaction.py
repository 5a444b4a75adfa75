"""Secrets of the user's, kept out of what primerl itself prints and writes. Standard library only.

Only values that this process knows can be found: whoever reads one notes it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

SHORTEST = 6
"""Characters; a shorter value is found in half the words of a log, and would make it unreadable."""
MARK = "<secret>"
_known: set[str] = set()


def note(values: Iterable[str]) -> None:
    for value in values:
        # As they are, as they are within JSON, and each line of those that have several.
        forms = {value, json.dumps(value)[1:-1], repr(value)[1:-1], *value.splitlines()}
        _known.update(form for form in forms if len(form) >= SHORTEST)


def redact(text: str) -> str:
    # The longest first: one may be within another.
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
