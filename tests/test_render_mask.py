"""Masks for supervised training: exactly what the assistant wrote, or an error that names the message."""

from __future__ import annotations

import copy
from array import array
from pathlib import Path

import pytest
import render_helpers as helpers
from primerl.render import Renderer, RenderError
from transformers import AutoTokenizer

Spans = list[str]


def masked(renderer: Renderer, messages: list[helpers.Message]) -> tuple[list[int], list[int], Spans]:
    """Ids, mask, and the text of each run of masked tokens."""
    ids_bytes, mask_bytes = renderer.render_with_mask(messages)
    ids, mask = array("i", ids_bytes).tolist(), list(mask_bytes)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for index, (token, bit) in enumerate(zip(ids, mask, strict=True)):
        if bit and (index == 0 or not mask[index - 1]):
            runs.append([])
        if bit:
            runs[-1].append(token)
    return ids, mask, [renderer.decode(run) for run in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Renderer:
    return Renderer(helpers.write_tiny_model(folder / "tiny"))


@pytest.fixture(scope="module")
def qwen3(folder: Path) -> Renderer:
    return Renderer(helpers.write_qwen(folder / "qwen3", helpers.trl_template("qwen3")))


def test_the_demo_masks_the_answer_and_its_end(tiny: Renderer) -> None:
    messages = [{"role": "user", "content": "Reverse: ab"}, {"role": "assistant", "content": "<r>ba</r>"}]
    ids, mask, spans = masked(tiny, messages)
    assert ids == tiny.render(messages, add_generation_prompt=False)
    assert spans == ["<r>ba</r><|im_end|>"]
    # The newline after the end of the turn is the template's, not the model's.
    assert (ids[-2:], mask[-2:]) == ([256, 198], [1, 0])


def test_each_answer_of_a_conversation_is_masked(tiny: Renderer) -> None:
    for seed in range(200):
        messages = helpers.conversation(seed, tools=False, reasoning=False)
        _, _, spans = masked(tiny, messages)
        # A message may hold the marker of the turn's end itself.
        answers = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
        assert spans == answers


def test_many_conversations_are_masked_like_one(tiny: Renderer) -> None:
    conversations = [helpers.conversation(seed, tools=False, reasoning=False) for seed in range(33)]
    one_by_one = [tiny.render_with_mask(messages) for messages in conversations]
    assert tiny.render_many_with_mask(conversations) == one_by_one
    assert tiny.render_many_with_mask([]) == []
    texts = [tiny.render_text(messages, add_generation_prompt=False) for messages in conversations]
    expected = [(*columns, text) for columns, text in zip(one_by_one, texts, strict=True)]
    assert tiny.render_many_with_text(conversations) == expected
    bad = [{"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(RenderError, match=r"conversations\[20\]: messages\[0\].content"):
        tiny.render_many_with_mask([*conversations[:20], bad])


def test_qwen3_masks_what_it_would_have_sampled(qwen3: Renderer) -> None:
    question = {"role": "user", "content": "Why?"}
    # The last answer gets an empty think block: the model has to write it, as it begins after the generation prompt.
    assert masked(qwen3, [question, {"role": "assistant", "content": "So."}])[2] == [
        "<think>\n\n</think>\n\nSo.<|im_end|>"
    ]
    thought = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nSo."}
    assert masked(qwen3, [question, thought])[2] == ["<think>\nHm\n</think>\n\nSo.<|im_end|>"]
    # Earlier answers are written without.
    assert masked(qwen3, [question, thought, question, thought])[2] == [
        "So.<|im_end|>",
        "<think>\nHm\n</think>\n\nSo.<|im_end|>",
    ]
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
    with_tool = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "assistant", "content": "Noon."},
    ]
    assert masked(qwen3, with_tool)[2] == [
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nNoon.<|im_end|>",
    ]


# LLaVA's takes images only: content as text is an error there, as in transformers.
TRAINING = [
    name for name in helpers.trl_template_names() if name.endswith("_training") and not name.startswith("llava")
]


@pytest.mark.parametrize("name", TRAINING)
def test_generation_blocks_give_the_mask_of_transformers(name: str, folder: Path) -> None:
    path = helpers.write_family(folder / name, helpers.trl_template(name))
    ours, theirs = Renderer(path), AutoTokenizer.from_pretrained(path)
    compared = 0
    for seed in range(24):
        messages = helpers.conversation(seed, system=False, tools=False, reasoning=False)
        if not any(message["role"] == "assistant" for message in messages):
            continue
        for message in messages:
            # White space at an edge merges with the template's own; that is a typed error, tested below.
            message["content"] = f"x{message['content']}x"
        reference = theirs.apply_chat_template(
            copy.deepcopy(messages), return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask, _ = masked(ours, messages)
        assert ids == reference["input_ids"]
        assert mask == reference["assistant_masks"]
        compared += 1
    assert compared >= 10


def test_a_token_across_the_boundary_is_an_error(folder: Path) -> None:
    renderer = Renderer(helpers.write_qwen(folder / "chatml", helpers.CHATML))
    # The newline after the role and the answer's own become one token.
    assert len(renderer.encode("\n\n")) == 1
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\ny"}]
    with pytest.raises(RenderError, match=r"messages\[1\]: a token crosses the boundary"):
        renderer.render_with_mask(messages)


def test_an_answer_the_template_rewrites_is_an_error(folder: Path) -> None:
    # Early answers are written in other letters than late ones, and nothing marks where.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content | length }}<|im_end|>\n{% endfor %}"
    )
    renderer = Renderer(helpers.write_qwen(folder / "rewriting", template))
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}
    assert masked(renderer, [user, answer])[2][0].endswith("yes<|im_end|>")
    with pytest.raises(RenderError, match=r"messages\[1\]: the chat template rewrites this assistant message"):
        renderer.render_with_mask([user, answer, user, answer])


def test_a_dropped_answer_is_an_error(folder: Path) -> None:
    template = "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    renderer = Renderer(helpers.write_qwen(folder / "dropping", template))
    with pytest.raises(RenderError, match=r"messages\[1\]: the chat template writes nothing"):
        renderer.render_with_mask([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])


def test_reserved_markers_are_refused(folder: Path) -> None:
    renderer = Renderer(helpers.write_qwen(folder / "marked", helpers.trl_template("qwen3_training")))
    messages = [{"role": "user", "content": "\U000f0001\U000f0a11\U000f0002"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(RenderError, match="reserved marker"):
        renderer.render_with_mask(messages)
