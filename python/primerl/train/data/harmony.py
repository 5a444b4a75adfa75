"""Which tokens of a conversation in the harmony format (gpt-oss) the assistant wrote, channels included.

Its template writes past answers otherwise than the model does: without their analysis, and closed by `<|end|>` where
the model ends its turn by `<|return|>`. So what is trained is what follows the last user's message: tool calls, and the
answer with its analysis. Everything else is context.

    <|start|>assistant[<|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..<|return|>]

The first `<|start|>assistant` of a turn is the prompt, later ones are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primerl.train.data.conversations import RowError
from primerl.train.data.template_checks import REASONING, SENTINEL

START, MESSAGE, CHANNEL, END, RETURN, CALL = (
    f"<|{name}|>" for name in ("start", "message", "channel", "end", "return", "call")
)
MARKUP = (START, MESSAGE, CHANNEL, END, RETURN, CALL, "<|constrain|>")
GENERATION = "generation %}"
"""The end of blocks by which a template itself says what the assistant wrote."""
FIELD = "thinking"
"""Where the template looks for the analysis of an answer."""
UNWRITTEN = "harmony: the conversation is not one that can be located"


def applies(template: str) -> bool:
    """Whether masks of this template's conversations are made here."""
    return all(mark in template for mark in (START, CHANNEL, RETURN)) and GENERATION not in template


def prepared(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with reasoning where the template looks for it, and without contents that are null, which it takes
    for texts.

    Raises RowError for text with markup of the format, which would pass for the assistant's.
    """
    found = []
    for index, given in enumerate(messages):
        message = dict(given)
        reasoning = next((message.pop(name) for name in REASONING if message.get(name)), None)
        for name in REASONING:
            message.pop(name, None)
        if reasoning is not None:
            message[FIELD] = reasoning
        if message.get("content") is None:
            message.pop("content", None)
        for text in (message.get("content"), reasoning):
            mark = next((mark for mark in MARKUP if isinstance(text, str) and mark in text), None)
            if mark is not None:
                raise RowError(UNWRITTEN, f"messages[{index}] contains {mark}, which is markup of its format")
        found.append(message)
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    """A message of the format, from `<|start|>` to the token that closes it."""

    first: int
    said: int
    """The first token after the role."""
    last: int
    header: str
    closed_by: str


def segments(pieces: Sequence[str]) -> list[Segment]:
    """The assistant's and others' messages. `pieces`: the text of each token."""
    found: list[Segment] = []
    first, said, header, in_header = -1, -1, "", False
    for index, piece in enumerate(pieces):
        if piece == START:
            first, said, header, in_header = index, index + 1, "", True
        elif first < 0:
            continue
        elif in_header and piece == MESSAGE:
            in_header = False
        elif in_header:
            header += piece
            if header == "assistant":
                said = index + 1
        elif piece in (END, RETURN, CALL):
            found.append(Segment(first, said, index, header, piece))
            first = -1
    return found


def mask(messages: Sequence[Mapping[str, Any]], pieces: Sequence[str], untrained: frozenset[int]) -> tuple[bytes, int]:
    """One byte a token, 1 where it is trained, and how many trained answers have reasoning that is not written.

    Args:
        messages: as `prepared`.
        pieces: the text of each token of the conversation as the template writes it.
        untrained: messages that are not to be trained, by their index.
    Raises:
        RowError: the answers cannot be distinguished.
    """
    roles = [message["role"] for message in messages]
    after = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
    answers = [index for index, role in enumerate(roles) if role == "assistant" and index > after]
    found = segments(pieces)
    last_user = max((place for place, one in enumerate(found) if one.header == "user"), default=-1)
    turns: list[list[Segment]] = [[]]
    for one in found[last_user + 1 :]:
        if not one.header.startswith("assistant"):
            continue
        turns[-1].append(one)
        if one.closed_by in (CALL, RETURN) or one.header.startswith("assistant<|channel|>final"):
            turns.append([])
    turns = [turn for turn in turns if turn]
    if len(turns) != len(answers):
        raise RowError(
            UNWRITTEN,
            f"the row has {len(answers)} answers after the last user message, but the chat template writes "
            f"{len(turns)}",
        )
    trained, left_out = bytearray(len(pieces)), 0
    for index, turn in zip(answers, turns, strict=True):
        if index in untrained:
            continue
        for place, one in enumerate(turn):
            begin = one.said if place == 0 else one.first
            trained[begin : one.last + 1] = b"\x01" * (one.last + 1 - begin)
        analysis = any(one.header.startswith("assistant<|channel|>analysis") for one in turn)
        left_out += FIELD in messages[index] and not analysis
    return bytes(trained), left_out


def written(messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
    """Raises RowError for a content that the template does not write."""
    for index, message in enumerate(messages):
        if message.get("content") and not message.get("tool_calls"):
            other = [*messages[:index], {**message, "content": SENTINEL}, *messages[index + 1 :]]
            if SENTINEL not in render(other):
                raise RowError(UNWRITTEN, f"messages[{index}].content is not written by the chat template")
