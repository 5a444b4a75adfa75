"""Functions that a config gives to an environment: tools, what they share, a reward."""

from __future__ import annotations

import os
from typing import Any


def load_index() -> dict[str, str]:
    return {"abc": "the first letters", "pid": str(os.getpid())}


def search(query: str, index: dict[str, str], missing: str = "nothing") -> str:
    """Look a word up."""
    return index.get(query, missing)


async def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


async def found(task: Any, trace: Any) -> float:
    return float(any("first letters" in str(message.content) for message in trace.tool_messages))
