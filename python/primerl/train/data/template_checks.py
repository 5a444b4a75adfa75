"""What a chat template does to the messages of a row without a warning.

It may drop content, which would not be trained; and templates do not escape control tokens in the text of messages:
`<|im_end|>` in a user's message ends the user's turn, as in `transformers`. Rows with either are counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from primerl.train.data.conversations import RowError, templates

# `primerl-render` (control_tokens.rs) defines control tokens alike for messages at the gateway, where one found is
# enough, and answers are the model's own; here each is named, and answers, which are trained, are searched for ends of
# turns.

PLAIN_TAGS = ("<think>", "</think>")
"""Added tokens that prompts mention in plain words, when they ask for reasoning between them."""
AUTHOR_ROLES = ("system", "developer")
"""Roles whose text may show the model its own syntax."""


class ControlTokens:
    """Which texts a model reads as control tokens: its tokenizer's special tokens, and other added tokens that its chat
    template writes. In an answer only those that end a turn count: the others may be what the model shall write."""

    def __init__(self, model_folder: Path, stops: Iterable[str]) -> None:
        """`stops`: the texts of the tokens that end a turn."""
        template = templates(model_folder)
        added = json.loads((model_folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
        control = [token["content"] for token in added if token.get("special") or token["content"] in template]
        stops = list(stops)
        self._control = _any_of([*control, *stops])
        self._stops = _any_of(stops)

    def found(self, messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """The control tokens in the contents of messages, each once, in the order of the text."""
        found: dict[str, None] = {}
        for message in messages:
            role = message["role"]
            tokens = self._stops if role == "assistant" else self._control
            if tokens is not None and role not in AUTHOR_ROLES:
                found.update(dict.fromkeys(tokens.findall(content_text(message))))
        return tuple(found)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Plain words (some tokenizers have `user` as a token) and white space are not markup."""
    markup = {token for token in tokens if re.search(r"[^\w\s]", token) and token not in PLAIN_TAGS}
    if not markup:
        return None
    return re.compile("|".join(re.escape(token) for token in sorted(markup, key=lambda token: (-len(token), token))))


DROPPED = "the chat template drops content"
EMPTY = "an answer without content"

SENTINEL = "zPrimerlSentinelz"
"""Put in a content's place, to see where a template writes it."""
THINKING_ENDS = "</think>"
REASONING = ("reasoning_content", "reasoning", "thinking")

Render = Callable[[list[dict[str, Any]]], str]
"""Renders messages by the template; raises ValueError if it refuses them."""


def roles_left_out(render: Render) -> set[str]:
    """The roles among `user` and `assistant` whose content is missing from what is rendered, as with a template that
    loops over the parts of a content and is given a text. `primerl.render` tries the other roles."""
    question, answer = {"role": "user", "content": SENTINEL}, {"role": "assistant", "content": SENTINEL}
    x, y = {**question, "content": "x"}, {**answer, "content": "y"}
    conversations = {"user": ([question], [question, y]), "assistant": ([x, answer], [x, answer, x])}
    left_out = set()
    for role, tried in conversations.items():
        shown = [found for found in (_shows(messages, render) for messages in tried) if found is not None]
        if shown and not any(shown):
            left_out.add(role)
    return left_out


def check_written(
    messages: list[dict[str, Any]], text: str, render: Render, left_out: set[str], trained: set[int]
) -> int:
    """How many of the messages `trained`, by their index, have reasoning that is not written. `text`: the messages as
    they are rendered; `left_out`: the answer of `roles_left_out`.

    Raises:
        RowError: a content is not written, or an answer that is trained would be nothing but the end of its turn.
    """
    at = 0
    thoughts: Counter[str] = Counter()
    for index, message in enumerate(messages):
        reasoning, said = _reasoning_and_words(message)
        if said:
            _check_role(index, message["role"], left_out)
            # In order, since a short content occurs somewhere in most texts.
            found = text.find(said, at)
            at = max(at, found + len(said)) if found >= 0 else at
            # A template that refuses the sentinel says nothing about the content.
            if found < 0 and _shows(replaced(messages, index, content=SENTINEL), render) is False:
                raise RowError(DROPPED, f"messages[{index}].content is not written by the chat template")
        elif index in trained and not message.get("tool_calls") and not _thinks(messages, index, render):
            raise RowError(
                EMPTY,
                f"messages[{index}] is an assistant message without content, tool calls or reasoning that the chat "
                "template writes: only the end of the turn would be trained; take it out, or set its `weight` to 0",
            )
        if index in trained and reasoning:
            thoughts[reasoning] += 1
    # The same thought in several answers has to be there as often.
    return sum(max(0, count - text.count(reasoning)) for reasoning, count in thoughts.items())


def _thinks(messages: list[dict[str, Any]], index: int, render: Render) -> bool:
    """Whether the reasoning of an answer that says nothing is written."""
    named = [name for name in REASONING if messages[index].get(name)]
    if named:
        return any(_shows(replaced(messages, index, **{name: SENTINEL}), render) for name in named)
    content = content_text(messages[index])
    thought = content.rpartition(THINKING_ENDS)[0].strip().removeprefix("<think>").strip()
    without = content.replace(thought, SENTINEL)
    return bool(thought) and bool(_shows(replaced(messages, index, content=without), render))


def replaced(messages: list[dict[str, Any]], index: int, **fields: Any) -> list[dict[str, Any]]:
    """The messages, with fields of one of them replaced."""
    return [*messages[:index], {**messages[index], **fields}, *messages[index + 1 :]]


def content_text(message: Mapping[str, Any]) -> str:
    """The content as `primerl.render` gives it to templates, and the gateway does."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return content or ""


def spoken_words(message: Mapping[str, Any]) -> str:
    """What a message says besides reasoning and tool calls."""
    return _reasoning_and_words(message)[1]


def _reasoning_and_words(message: Mapping[str, Any]) -> tuple[str, str]:
    """The reasoning of an answer, and what it says besides. Templates write past answers without thinking, also without
    what is in their content."""
    content = content_text(message)
    has_none = THINKING_ENDS not in content and message.keys().isdisjoint(REASONING)
    if message["role"] != "assistant" or has_none:
        return "", content.strip()
    thought, _, said = content.rpartition(THINKING_ENDS)
    given = next((message[name] for name in REASONING if isinstance(message.get(name), str) and message[name]), thought)
    return given.strip().removeprefix("<think>").strip(), said.strip()


def _check_role(index: int, role: str, left_out: set[str]) -> None:
    if role in left_out:
        raise RowError(
            DROPPED,
            f"messages[{index}].content is not written by the chat template, which writes no text of a {role} message; "
            "it may take lists of content parts only: use a model folder whose template takes text",
        )


def _shows(messages: list[dict[str, Any]], render: Render) -> bool | None:
    """Whether the sentinel is rendered, in any letter case; None if the template refuses the messages."""
    try:
        return SENTINEL.lower() in render(messages).lower()
    except ValueError:
        return None
