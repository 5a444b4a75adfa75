"""`transformers` as the reference of the golden tests: the same text, the same ids, the same refusals."""

from __future__ import annotations

import copy
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import render_corpus as corpus
from jinja2.exceptions import TemplateError
from primerl.render import Renderer, RenderError
from transformers import AutoTokenizer


class FixedClock(datetime):
    """For `transformers.utils.chat_template_utils.datetime`."""

    at = 0.0

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(cls.at, tz)


class Pair:
    """A model folder, read by both. `rendered` counts what both rendered alike."""

    def __init__(self, folder: Path, theirs: Any = None) -> None:
        self.ours = Renderer(folder)
        self.theirs = AutoTokenizer.from_pretrained(folder) if theirs is None else theirs
        self.wants_text = self.probe({"a": 1}) is None and self.probe('{"a": 1}') is not None
        self.rendered = 0

    def probe(self, arguments: Any) -> str | None:
        """What `transformers` makes of a call with these arguments."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "y"},
        ]
        return self.reference(corpus.Case(messages, generate=False))

    def reference(self, case: corpus.Case) -> str | None:
        """The text that `transformers` renders, None where it refuses."""
        FixedClock.at = case.now
        try:
            text = self.theirs.apply_chat_template(
                copy.deepcopy(case.messages),
                tools=case.tools,
                documents=case.documents,
                add_generation_prompt=case.generate,
                tokenize=False,
                **case.kwargs,
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError):
            return None
        assert isinstance(text, str)
        return text

    def leaves_out(self, case: corpus.Case, text: str, refusal: str) -> bool:
        """Whether the text lacks what the refusal says it lacks: the tools, or a message."""
        if refusal.startswith("tools are given"):
            without = self.ours.render_text(case.messages, None, case.generate, case.kwargs, case.documents, case.now)
            return without == text
        named = re.match(r"messages\[(\d+)\]", refusal)
        content = case.messages[int(named[1])].get("content") if named else None
        return isinstance(content, str) and bool(content.strip()) and content.strip() not in text

    def compare(self, case: corpus.Case) -> str | None:
        """What differs, as a sentence."""
        given = (case.messages, case.tools, case.generate, case.kwargs, case.documents, case.now)
        # OpenAI's wire has arguments as text; for a template that wants mappings, the renderer reads them.
        messages = case.messages if self.wants_text else corpus.parsed_arguments(case.messages)
        expected = self.reference(corpus.Case(messages, *given[1:2], case.documents, *given[2:4], case.now))
        try:
            found = self.ours.render_text(*given)
        except RenderError as error:
            return None if expected is None else f"refused by the renderer alone: {error}"
        if expected is None:
            return "refused by transformers alone"
        if found != expected:
            at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
            return f"at {at}: {found[at - 30 : at + 60]!r} instead of {expected[at - 30 : at + 60]!r}"
        try:
            ids = self.ours.render(*given)
        except RenderError as refusal:
            # A prompt without what it was given is refused; the text says whether it is one.
            if not self.leaves_out(case, found, str(refusal)):
                return f"refused by the renderer alone: {refusal}"
            ids = self.ours.encode(found)
        if ids != self.theirs.encode(expected, add_special_tokens=False):
            return "other ids"
        self.rendered += 1
        return None
