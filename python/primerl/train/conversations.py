"""The file of supervised fine-tuning: JSON lines, each one conversation. No torch, so that it is checked at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class RowError(ValueError):
    """A row cannot be trained on. The message names file, line and reason."""


def read_conversations(path: Path) -> tuple[list[list[dict[str, Any]]], list[int]]:
    """The messages of every row, and the rows' line numbers. Raises [`RowError`][]."""
    conversations, lines = [], []
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    conversations.append(_conversation(text, f"{path}, line {number}"))
                    lines.append(number)
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"data.path: {path} cannot be read: {error}") from error
    if not conversations:
        raise RowError(f"data.path: {path} has no rows")
    return conversations, lines


def _conversation(text: str, where: str) -> list[dict[str, Any]]:
    """The messages of one line: `messages` as they are, or `prompt` then `completion`, each a text or messages."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RowError(f"{where}: expected an object with `messages`, or with `prompt` and `completion`")
    if "messages" in fields:
        messages = fields["messages"]
    elif "prompt" in fields and "completion" in fields:
        messages = _as_messages(fields["prompt"], "user") + _as_messages(fields["completion"], "assistant")
    else:
        raise RowError(f"{where}: needs `messages`, or `prompt` and `completion`; it has {sorted(fields)}")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise RowError(f"{where}: messages must be a list of objects with a `role`")
    if fields.get("tools"):
        raise RowError(f"{where}: rows with `tools` are not supported")
    return messages


def _as_messages(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]
