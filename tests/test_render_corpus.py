"""Every published template against `transformers`, over a generated corpus: the same bytes, ids and refusals."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import render_corpus as corpus
import render_helpers as helpers
from primerl.render import Renderer
from render_reference import FixedClock, Pair
from transformers.utils import chat_template_utils

CASES = 40
TEMPLATES = {**{name: helpers.trl_template(name) for name in helpers.trl_template_names()}, **helpers.more_templates()}

# Where minijinja is known to answer otherwise: `map(..) | tojson` is refused by Python, and HTML escaping that `| safe`
# switches on.
KNOWN_TO_DIFFER = {"llama-cpp-deepseek-r1", "meetkai-functionary-medium-v3.1"}

# They refuse most cases.
STRICT = {"llava_next", "llava_next_training"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_published_template(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.rpartition("/")[2] in KNOWN_TO_DIFFER:
        pytest.skip("differs in a known way")
    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)
    pair = Pair(helpers.write_family(folder / name, TEMPLATES[name]))
    first = sorted(TEMPLATES).index(name) * 1000
    differences = {seed: pair.compare(corpus.case(seed)) for seed in range(first, first + CASES)}
    told = {seed: difference for seed, difference in differences.items() if difference}
    assert not told, "\n".join(f"case({seed}): {difference}" for seed, difference in told.items())
    # The others are refused by the template, here as there.
    assert pair.rendered >= (2 if name in STRICT else CASES // 3)


def test_the_corpus_is_large() -> None:
    assert len(TEMPLATES) * CASES >= 2000


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
