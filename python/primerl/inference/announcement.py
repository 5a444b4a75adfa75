"""The line by which an engine says that it serves, once it has generated a token: users see it, and `primerl inference`
of several engines finds it in their logs."""

from __future__ import annotations

import re

_LINE = re.compile(rb"^serving (.*) at (http://\S+)$", re.MULTILINE)


def line(model: str, url: str) -> str:
    return f"serving {model} at {url}"


def found(log: bytes) -> tuple[str, str] | None:
    """Name of the model and URL, where the log has the line."""
    match = _LINE.search(log)
    return None if match is None else (match[1].decode(), match[2].decode())
