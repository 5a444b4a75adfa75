"""Words of others on a terminal or in a log: a client's, a model's, an environment's."""

from __future__ import annotations


def printable(text: str) -> str:
    """As one line, in which no character moves the cursor or begins a line."""
    return "".join(one if one.isprintable() else "?" for one in text)
