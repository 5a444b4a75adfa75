"""Words of others on a terminal or in a log: a client's, a model's, an environment's."""

from __future__ import annotations


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str, at_most: int | None = None) -> str:
    """As one line, in which no character moves the cursor or begins a line. `at_most`: characters, after which it is
    cut."""
    cut = "" if at_most is None or len(text) <= at_most else f".. ({len(text)} characters)"
    return "".join(one if one.isprintable() else "?" for one in text[:at_most]) + cut
