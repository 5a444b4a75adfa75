"""Every published template against `transformers`, over a generated corpus: the same bytes, ids and refusals."""

from __future__ import annotations

import copy
import json
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import render_corpus as corpus
import render_helpers as helpers
from jinja2.exceptions import TemplateError
from primerl.render import Renderer, RenderError
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

CASES = 40
TEMPLATES = {**{name: helpers.trl_template(name) for name in helpers.trl_template_names()}, **helpers.more_templates()}
# Rendered by both, as text; written by each template's test, read by the last test.
RENDERED: set[str] = set()

# Where minijinja is known to answer otherwise: `map(..) | tojson` is refused by Python, and HTML escaping that `| safe`
# switches on.
KNOWN_TO_DIFFER = {"llama-cpp-deepseek-r1", "meetkai-functionary-medium-v3.1"}


class FixedClock(datetime):
    at = 0.0

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(cls.at, tz)


class Pair:
    """A template with a tokenizer, read by both."""

    def __init__(self, folder: Path, template: str) -> None:
        helpers.write_family(folder, template)
        self.ours = Renderer(folder)
        self.theirs = AutoTokenizer.from_pretrained(folder)
        self.wants_text = self.probe({"a": 1}) is None and self.probe('{"a": 1}') is not None

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
        if self.ours.render(*given) != self.theirs.encode(expected, add_special_tokens=False):
            return "other ids"
        RENDERED.add(json.dumps([case.messages, case.tools, case.kwargs]))
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_published_template(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.rpartition("/")[2] in KNOWN_TO_DIFFER:
        pytest.skip("differs in a known way")
    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)
    pair = Pair(folder / name, TEMPLATES[name])
    first = sorted(TEMPLATES).index(name) * 1000
    differences = {seed: pair.compare(corpus.case(seed)) for seed in range(first, first + CASES)}
    told = {seed: difference for seed, difference in differences.items() if difference}
    assert not told, "\n".join(f"case({seed}): {difference}" for seed, difference in told.items())


def test_the_corpus_is_large(request: pytest.FixtureRequest) -> None:
    ran = Counter(item.name.partition("[")[0] for item in request.session.items)["test_published_template"]
    if ran < len(TEMPLATES):
        pytest.skip("not every template was asked for")
    assert len(RENDERED) >= 2000


PINNED = 1_769_999_999.25


@pytest.mark.parametrize(
    "directive",
    ["%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%A %a", "%H:%M:%S", "%I %p", "%j", "%U %W %w %u", "%y %C %G %V", "%e %h",
     "%c", "%x", "%X", "%D %F %R %T", "%f", "[%Z%z]", "%%d", "%-d %-m", "%n%t", "%s"],
)  # fmt: skip
def test_the_clock_formats_like_python(directive: str, folder: Path) -> None:
    template = "{{ strftime_now('" + directive + "') }}"
    renderer = Renderer(helpers.write_family(folder / f"clock_{abs(hash(directive))}", template))
    text = renderer.render_text([{"role": "user", "content": ""}], now=PINNED)
    assert text == datetime.fromtimestamp(PINNED).strftime(directive)
