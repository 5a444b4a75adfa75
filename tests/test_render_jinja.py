"""What templates may write, against `transformers`' Jinja: filters, tests, methods, blocks, white space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
from jinja2.exceptions import TemplateError
from primerl.render import Renderer, RenderError
from transformers.utils.chat_template_utils import render_jinja_template

# One a line; each is rendered by both.
SNIPPETS = (Path(__file__).parent / "jinja_snippets.txt").read_text(encoding="utf-8").strip("\n").split("\n")
LAYOUTS = [
    "a\n  {% if t %}\n    x\n  {% endif %}\ny\n",
    "  {{- s }}  \n  {%- for i in nums %}\n {{ i }}\n  {%- endfor %}\nz\n\n",
    "a\r\nb\r{{ 'c\r\nd' }}\n", "{#- x #}\n\n  {#- y -#}\n a\n{# z #}\nb",
    "{% if t -%}\n  a\n{%- else -%}\n b\n{%- endif %}\n\n", "\t{% set a = 1 %}\n{{ a }}\n  \t {# c #}  \nx",
    "{% macro m() %}\n  a\n{% endmacro %}\n[{{ m() }}]\n", "{{ 'a' }}\n\n",
    "{% for i in nums %}\n{{ i }}\n{% endfor %}\n", "x {%- raw %} {{ y }} {% endraw -%} z",
    "{% if t %}a{% endif %}\n{% if t %}b{% endif %}\n  c", "{{ s }} \n {%- if f %}\n{%- elif t %}\n E\n{%- endif %}",
]  # fmt: skip
REFUSED = [
    "{{ undefined_x.y }}", "{{ n.y.z }}", "{{ undefined_x + 'a' }}", "{{ n + 'a' }}", "{{ 'a' + 1 }}", "{{ 'a' in n }}",
    "{{ undefined_x | tojson }}", "{% for x in n %}{% endfor %}", "{% for x in i %}{% endfor %}", "{{ n | length }}",
    "{{ raise_exception('no') }}", "{{ s.foo() }}", "{{ n.foo() }}", "{{ foo(s) }}", "{{ nums.append(1) }}",
    "{{ d.update({'x': 1}) }}", "{{ d.pop('b') }}", "{{ s.index('zz') }}", "{{ ', '.join(l) }}", "{{ 'a'.split('') }}",
]  # fmt: skip
DATA: dict[str, Any] = {
    "s": "Größe x  y\n", "e": "", "n": None, "t": True, "f": False, "i": 3, "neg": -3, "fl": 2.5, "tiny": 1e-7,
    "big": 1e16, "whole": 2.0, "l": ["b", "a", "C", 1, None, True, 2.5], "strs": ["b", "a", "C"], "nums": [3, 1, 2],
    "el": [], "ed": {}, "think": "<think>\nx\n</think>\n\ny</think>z", "html": "<a href='x'>&\"</a>",
    "d": {"b": 1, "a": "x'y", "C": None, "items": [1], "get": 2, "keys": 3,
          "nested": {"q": "\"'", "u": "é\n\u200b\U0001f600\x7f"}},
    "ld": [{"k": "a", "v": 1}, {"k": "b", "v": 2}, {"k": "a", "v": 3}], "long": "the quick brown fox " * 8,
    "ws": "\x1c\x85\u00a0 a \u2028\x1f", "lines": "a\nb\r\nc\rd\x0be\u2028f\n",
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "hi"}]


def renderer(folder: Path, template: str) -> Renderer:
    helpers.write_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    return Renderer(folder)


def ours(folder: Path, template: str) -> str:
    return renderer(folder, template).render_text(MESSAGES, None, False, DATA)


def reference(template: str) -> str:
    rendered, _ = render_jinja_template([MESSAGES], chat_template=template, **DATA)
    return str(rendered[0])


def test_expressions(tmp_path: Path) -> None:
    # One template of all: each in a loop of its own, so that no variable reaches the next.
    separator = "\n=====\n"
    template = separator.join("{% for _ in [1] %}" + snippet + "{% endfor %}" for snippet in SNIPPETS)
    found, expected = ours(tmp_path, template).split("====="), reference(template).split("=====")
    assert len(found) == len(expected) == len(SNIPPETS)
    told = [(s, a, b) for s, a, b in zip(SNIPPETS, found, expected, strict=True) if a != b]
    assert not told, "\n".join(f"{snippet}: {a!r} instead of {b!r}" for snippet, a, b in told)


@pytest.mark.parametrize("template", LAYOUTS)
def test_white_space(template: str, tmp_path: Path) -> None:
    assert ours(tmp_path, template) == reference(template)


@pytest.mark.parametrize("template", REFUSED)
def test_refusals(template: str, tmp_path: Path) -> None:
    with pytest.raises((TemplateError, TypeError, ValueError)):
        reference(template)
    with pytest.raises(RenderError):
        ours(tmp_path, template)
