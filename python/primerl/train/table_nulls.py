"""Nulls of a table's row. A table gives every object the keys of all the others, so most are padding, but an argument
of a tool call may have been written as null: the declaration of its tool says so where the argument is required."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from primerl.train.conversations import declared_parameters, without_none

MESSAGES = ("messages", "prompt", "completion")


def without_padding(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The row without nulls that may be padding, and the arguments of calls (`add(b)`) among these that their tools
    declare: whether they were written is not known."""
    cleaned = {name: _cell(name, value) for name, value in row.items()}
    columns = [name for name in MESSAGES if isinstance(row.get(name), list)]
    pairs = [pair for name in columns for pair in zip(_calls(row[name]), _calls(cleaned[name]), strict=True)]
    if not any(None in given["arguments"].values() for given, _ in pairs):
        return cleaned, []
    declared = declared_parameters(cleaned)
    unsure = []
    for given, kept in pairs:
        parameters = declared.get(str(given.get("name")), {})
        required, properties = _names(parameters, "required"), _names(parameters, "properties")
        arguments = given["arguments"]
        unsure += [
            f"{given.get('name')}({name})"
            for name, value in arguments.items()
            if value is None and name in properties and name not in required
        ]
        # In the order it was written in: templates write it out as it is.
        kept["arguments"] = {
            name: kept["arguments"].get(name)
            for name, value in arguments.items()
            if value is not None or name in required
        }
    return cleaned, unsure


def _cell(name: str, value: Any) -> Any:
    if name in MESSAGES and isinstance(value, list):
        # Templates tell an empty content from none at all.
        return [without_none(message, keep=("content",)) for message in value]
    return without_none(value)


def _names(parameters: Mapping[str, Any], key: str) -> set[str]:
    value = parameters.get(key)
    return {str(name) for name in value} if isinstance(value, list | Mapping) else set()


def _calls(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """The functions that are called with an object of arguments."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), Mapping):
                yield function
