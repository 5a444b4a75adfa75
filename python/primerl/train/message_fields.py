"""Fields of a message: those that say whether it is trained, and those that would be ignored without a word."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRAINED = {
    "weight": True,
    "loss": True,
    "loss_mask": True,
    "train": True,
    "trainable": True,
    "training": True,
    "masked": False,
}
"""Fields that say whether a message is trained, as other trainers call them, and the value by which it is."""
KNOWN = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "refusal"),
        *("reasoning_content", "reasoning", "reasoning_details", "thinking"),
    )
)
"""Of OpenAI's messages, and other servers' names for reasoning."""
NOTES = frozenset(
    (
        *("id", "type", "status", "index", "model", "metadata", "annotations", "timestamp", "created", "created_at"),
        *("finish_reason", "stop_reason", "logprobs", "usage", "provider_specific_fields"),
        *("source", "language", "toxic", "redacted", "country", "state", "header", "hashed_ip", "turn_identifier"),
        *("num_tokens", "tokens", "score"),
    )
)
"""Records about a message, which nobody would want to be trained."""


class FieldError(ValueError):
    """A field has a value that means nothing. The message begins with the field's name."""


def take_marks(message: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The message without its fields of `TRAINED`, and whether all of these let it be trained.

    Raises FieldError.
    """
    if TRAINED.keys().isdisjoint(message):  # as in nearly all rows, of which there may be millions
        return dict(message), True
    is_trained = True
    for name, by in TRAINED.items():
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise FieldError(f"{name} is {value!r}; it must be 0 or 1, or false or true")
        is_trained = is_trained and bool(value) is by
    return {name: value for name, value in message.items() if name not in TRAINED}, is_trained


def unknown(message: Mapping[str, Any]) -> list[str]:
    """Names of fields that have a value, and that only the chat template may know."""
    others = (name for name in message if name not in KNOWN and name not in NOTES)
    return [name for name in others if message[name] not in (None, "", [], {})]


class TemplateFields:
    """Which fields a model's chat template asks for."""

    def __init__(self, model_folder: Path) -> None:
        self._text = templates(model_folder)
        self._named: dict[str, bool] = {}

    def names(self, field: str) -> bool:
        if field not in self._named:
            self._named[field] = re.search(rf"(?<!\w){re.escape(field)}(?!\w)", self._text) is not None
        return self._named[field]


def templates(model_folder: Path) -> str:
    """The text of all chat templates in the folder."""
    files = [model_folder / "chat_template.jinja", *sorted(model_folder.glob("additional_chat_templates/*.jinja"))]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    config = model_folder / "tokenizer_config.json"
    given = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    entries = given if isinstance(given, list) else [given]
    texts += [entry.get("template", "") if isinstance(entry, dict) else entry or "" for entry in entries]
    return "\n".join(texts)
