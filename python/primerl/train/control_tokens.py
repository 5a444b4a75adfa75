"""Control tokens of a model in the text of messages. Templates do not escape them: `<|im_end|>` in what a user says
ends the user's turn, as in `transformers`. Nothing else tells of it, so rows that hold them are counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from primerl.train.message_fields import templates
from primerl.train.written import content_text

REASONING = ("<think>", "</think>")
"""Prompts ask for reasoning between these, in plain words."""
OWN = ("system", "developer")
"""Roles whose text is the author's, who may show the model its own syntax there."""


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
            if tokens is not None and role not in OWN:
                found.update(dict.fromkeys(tokens.findall(content_text(message))))
        return tuple(found)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Words (some tokenizers have `user` as a token) and white space are no markup."""
    markup = {token for token in tokens if re.search(r"[^\w\s]", token) and token not in REASONING}
    if not markup:
        return None
    return re.compile("|".join(re.escape(token) for token in sorted(markup, key=lambda token: (-len(token), token))))
