"""The renderer against `transformers.apply_chat_template`: the same text, the same ids."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
from jinja2.exceptions import TemplateError
from primerl.render import Renderer, RenderError
from transformers import AutoTokenizer

CORPUS = 120


class Pair:
    """A model folder, read by both."""

    def __init__(self, folder: Path) -> None:
        self.ours = Renderer(folder)
        self.theirs = AutoTokenizer.from_pretrained(folder)

    def reference(self, messages: list[helpers.Message], **options: Any) -> tuple[str, list[int]]:
        text = self.theirs.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options)
        return text, self.theirs.encode(text, add_special_tokens=False)

    def compare(self, messages: list[helpers.Message], tools: list[Any] | None, generate: bool, **kwargs: Any) -> bool:
        """Whether the template takes the conversation; asserts that both agree on it, or both refuse."""
        try:
            text, ids = self.reference(messages, tools=tools, add_generation_prompt=generate, **kwargs)
        except (TemplateError, TypeError):
            with pytest.raises(RenderError):
                self.ours.render_text(messages, tools, generate, kwargs)
            return False
        assert self.ours.render_text(messages, tools, generate, kwargs) == text
        without = self.reference(messages, tools=None, add_generation_prompt=generate, **kwargs)[0] if tools else ""
        if without == text:
            # The text is the reference's, but a model would miss the tools.
            with pytest.raises(RenderError, match="tools are given"):
                self.ours.render(messages, tools, generate, kwargs)
            return True
        assert self.ours.render(messages, tools, generate, kwargs) == ids
        assert self.ours.decode(ids) == self.theirs.decode(ids)
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Pair:
    return Pair(helpers.write_tiny_model(folder / "tiny"))


@pytest.fixture(scope="module")
def qwen3(folder: Path) -> Pair:
    return Pair(helpers.write_qwen(folder / "qwen3", helpers.trl_template("qwen3")))


@pytest.fixture(scope="module")
def llama3(folder: Path) -> Pair:
    return Pair(helpers.write_llama(folder / "llama3", helpers.trl_template("llama3")))


def test_the_demo_prompt_has_its_golden_ids(tiny: Pair) -> None:
    golden = [258, 260, 198, 49, 68, 85, 68, 81, 82, 68, 25, 220, 80, 86, 87, 88, 89, 256, 198, 258, 261, 198]
    assert tiny.ours.render([{"role": "user", "content": "Reverse: qwxyz"}]) == golden
    assert tiny.ours.stop_token_ids == [256]
    assert tiny.ours.max_positions == 2048


def test_these_tokenizers_run_on_the_fast_backend(tiny: Pair, qwen3: Pair, llama3: Pair) -> None:
    for pair in (tiny, qwen3, llama3):
        assert (pair.ours.backend, pair.ours.backend_reason) == ("fast", None)


def test_chatml(tiny: Pair) -> None:
    for seed in range(CORPUS):
        messages = helpers.conversation(seed, tools=False, reasoning=False)
        assert tiny.compare(messages, None, generate=seed % 2 == 0)


def test_qwen3(qwen3: Pair) -> None:
    for seed in range(CORPUS):
        kwargs = [{}, {"enable_thinking": False}, {"enable_thinking": True}][seed % 3]
        tools = helpers.TOOLS if seed % 4 == 0 else None
        assert qwen3.compare(helpers.conversation(seed), tools, generate=seed % 2 == 0, **kwargs)


def test_llama3(llama3: Pair) -> None:
    for seed in range(CORPUS):
        messages = helpers.conversation(seed, tools=False, reasoning=False)
        assert llama3.compare(messages, None, generate=seed % 2 == 0)


def test_tools_in_json_text_render_like_mappings(qwen3: Pair) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "index": 0, "function":
            {"name": "clock", "arguments": {"b": 1, "a": "é"}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]  # fmt: skip
    as_text = copy.deepcopy(messages)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"b":1,"a":"\\u00e9"}'  # type: ignore[index]
    assert qwen3.compare(messages, helpers.TOOLS, generate=True)
    assert qwen3.ours.render(as_text, helpers.TOOLS) == qwen3.ours.render(messages, helpers.TOOLS)


@pytest.mark.parametrize("name", helpers.trl_template_names())
def test_published_templates(name: str, folder: Path) -> None:
    pair = Pair(helpers.write_family(folder / name, helpers.trl_template(name)))
    taken = 0
    for seed in range(12):
        # Half of the conversations are plain: some templates know neither tools nor system messages.
        plain = seed % 2 == 0
        messages = helpers.conversation(seed, system=not plain, tools=not plain, reasoning=not plain)
        tools = helpers.TOOLS if seed % 4 == 1 else None
        taken += pair.compare(messages, tools, generate=seed % 3 == 0)
    assert taken >= 2


def test_content_parts_of_text_are_joined(tiny: Pair) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    whole = tiny.ours.render([{"role": "user", "content": "one\ntwo"}])
    assert tiny.ours.render([{"role": "user", "content": parts}]) == whole


def test_tools_that_the_template_leaves_out_are_refused(tiny: Pair, qwen3: Pair) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for render in (tiny.ours.render, tiny.ours.render_with_mask, lambda m, t: tiny.ours.render_many_with_mask([m], t)):
        with pytest.raises(ValueError, match="tools are given, but the model's chat template does not write them"):
            render(messages, helpers.TOOLS)
        render(messages, [])
    assert helpers.TOOLS[0]["function"]["name"] in qwen3.ours.decode(qwen3.ours.render(messages, helpers.TOOLS))


def test_errors_name_what_is_wrong(tiny: Pair, tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="role"):
        tiny.ours.render([{"content": "x"}])
    with pytest.raises(RenderError, match="content must be a string, null, or a list"):
        tiny.ours.render([{"role": "user", "content": 3}])
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(RenderError, match=r'messages\[1\].content holds a part of type "image_url"'):
        tiny.ours.render([{"role": "user", "content": "x"}, {"role": "user", "content": [image]}])
    with pytest.raises(ValueError, match="does not exist"):
        Renderer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(helpers.CHATML, encoding="utf-8")
    with pytest.raises(RenderError, match=r"tokenizer\.json"):
        Renderer(tmp_path)
