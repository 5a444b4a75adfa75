"""One row of a dataset as a conversation. No torch, so that rows are checked before anything heavy is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""Fields of OpenAI's messages, and other servers' names for reasoning."""
NOTES = frozenset(
    (
        *("id", "type", "status", "index", "model", "metadata", "annotations", "timestamp", "created", "created_at"),
        *("finish_reason", "stop_reason", "logprobs", "usage", "provider_specific_fields"),
        *("source", "language", "toxic", "redacted", "country", "state", "header", "hashed_ip", "turn_identifier"),
        *("num_tokens", "tokens", "score"),
    )
)
"""Fields that only describe a message. Any other unknown field is reported, since ignoring it may be a mistake."""


REASONING_OPTIONS = ("enable_thinking", "reasoning_effort")
"""Variables of chat templates that a row may set, and that mean nothing to a template that does not read them."""


class FieldError(ValueError):
    """A field has an invalid value. The message begins with the field's name."""


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
    if message.keys() <= KNOWN:  # as in nearly all rows
        return []
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


COLUMNS = ("messages", "prompt", "completion", "tools", "tool_defs", "chat_template_kwargs")
"""Columns that are read; others are ignored."""
BEHIND = {"prompt": "messages", "completion": "messages", "tool_defs": "tools"}
"""Columns that are not read if the other one exists."""


class RowError(ValueError):
    """A row cannot be trained on. The message is the reason; `kind` groups reasons."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    """Columns of `BEHIND` that are not read because another one exists."""
    untrained: frozenset[int] = frozenset()
    """Indices of messages that are marked as not to be trained, whatever their role."""


SCHEMA = "not a conversation"


def conversation(row: object) -> Conversation:
    """`messages` as they are, or `prompt` then `completion`, each a text or messages. A value of None counts as a
    column that is not there, for tables have every column in every row; so does an empty value of a column other than
    the messages, for some tables have no None.

    Raises:
        RowError: of kind `SCHEMA`.
    """
    if not isinstance(row, Mapping):
        raise RowError(SCHEMA, "expected an object with `messages`, or with `prompt` and `completion`")
    fields = {name: row[name] for name in COLUMNS if _is_there(name, row.get(name))}
    if "messages" in fields:
        messages = _parsed(fields["messages"], "messages")
    elif "prompt" in fields and "completion" in fields:
        messages = _as_messages(fields["prompt"], "prompt", "user")
        messages = messages + _as_messages(fields["completion"], "completion", "assistant")
    else:
        raise RowError(SCHEMA, f"needs `messages`, or `prompt` and `completion`; it has {sorted(map(str, row))}")
    if not isinstance(messages, list) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    ):
        raise RowError(SCHEMA, "messages must be a list of objects with a `role`")
    if not messages:
        raise RowError(SCHEMA, "messages is an empty list")
    kwargs = _parsed(fields.get("chat_template_kwargs", {}), "chat_template_kwargs")
    if not isinstance(kwargs, Mapping):
        raise RowError(SCHEMA, "chat_template_kwargs must be an object, or the text of one")
    ignored = tuple(name for name, before in BEHIND.items() if name in fields and before in fields)
    unmarked, untrained = _take_marks(messages)
    return Conversation(unmarked, _tools(fields), dict(kwargs), ignored, untrained)


def _take_marks(messages: list[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], frozenset[int]]:
    kept, untrained = [], []
    for index, message in enumerate(messages):
        try:
            unmarked, is_trained = take_marks(message)
        except FieldError as error:
            raise RowError(SCHEMA, f"messages[{index}].{error}") from error
        kept.append(unmarked)
        if not is_trained:
            untrained.append(index)
    return kept, frozenset(untrained)


def _is_there(name: str, value: Any) -> bool:
    if name in ("messages", "prompt", "completion"):
        return value is not None
    return value.strip() not in ("", "[]", "{}", "null") if isinstance(value, str) else bool(value)


def without_none(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """`value` without the keys that are None, at any depth. A table gives every object the keys of all the others."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None or key in keep}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _as_messages(value: Any, name: str, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return value
    raise RowError(SCHEMA, f"{name} must be a text or a list of messages")


def _parsed(value: Any, name: str) -> Any:
    """Nested values are often stored as JSON texts in tables."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(SCHEMA, f"{name} is a text, but not JSON: {error}") from error


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    name = "tools" if "tools" in fields else "tool_defs"
    tools = _parsed(fields.get(name, []), name)
    if not isinstance(tools, list):
        raise RowError(SCHEMA, f"{name} must be a list, or the text of one")
    return [_function(_parsed(tool, name), f"{name}[{index}]") for index, tool in enumerate(tools)] or None


def declared_parameters(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """JSON schemas of the parameters of a row's tools, by name; empty for tools that cannot be read."""
    try:
        tools = _tools({name: row[name] for name in ("tools", "tool_defs") if _is_there(name, row.get(name))})
    except RowError:
        return {}
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or []}


def _function(tool: Any, where: str) -> dict[str, Any]:
    """OpenAI's schema, `{"type": "function", "function": {"name", "description", "parameters"}}`, of a tool that is
    written in it, without its envelope, or with Anthropic's `input_schema`."""
    if not isinstance(tool, Mapping):
        raise RowError(SCHEMA, f"{where} must be an object")
    if tool.get("type", "function") != "function" and "name" not in tool:
        raise RowError(SCHEMA, f"{where} is of type {tool['type']!r}; only functions can be declared")
    declared = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
    if not isinstance(declared.get("name"), str) or not declared["name"]:
        raise RowError(SCHEMA, f"{where} has no `name`")
    if declared is not tool:
        # In the order it was written in: templates write it out as it is.
        envelope = tool if "type" in tool else {"type": "function", **tool}
        return {**envelope, "function": _with_parameters(declared, where)}
    return {"type": "function", "function": _with_parameters(declared, where)}


def _with_parameters(declared: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {key: value for key, value in declared.items() if key not in ("type", "input_schema")}
    parameters = _parsed(function.get("parameters", declared.get("input_schema")), f"{where}.parameters")
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            raise RowError(SCHEMA, f"{where}.parameters must be an object")
        function["parameters"] = dict(parameters)
    return function
