"""What a chat template leaves out of a row, or writes otherwise, is refused or counted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
from mask_helpers import ALL_MASKS, CALL, THOUGHT, trained_runs
from primerl.train.data.conversations import Conversation, RowError, conversation
from primerl.train.data.masks import Columns, Masker
from primerl.train.sft_settings import LossMaskConfig
from settings_helpers import filled
from sft_helpers import NOW, assistant, user

LEFT_OUT: list[tuple[str, list[dict[str, Any]], str]] = [
    ("qwen3", [{"role": "human", "content": "X"}, user("q"), assistant("a")], 'messages[0].role is "human"'),
    ("qwen3", [user("q"), {"role": "function", "content": "X"}, assistant("a")], 'messages[1].role is "function"'),
    ("llama3", [{"role": "User", "content": "X"}, assistant("a")], 'messages[0].role is "User"'),
    ("llama3", [user("q"), {**assistant(""), "tool_calls": [CALL]}], "messages[1].tool_calls are not written"),
    ("gemma3", [user("q"), {**assistant("a"), "tool_calls": [CALL]}], "messages[1].tool_calls are not written"),
    ("qwen2_5", [user("q"), THOUGHT, user("r"), assistant("b")], "messages[1].reasoning_content is not written"),
]


@pytest.mark.parametrize(
    "mask",
    [filled(LossMaskConfig), filled(LossMaskConfig, user=True), filled(LossMaskConfig, user=True, assistant=False)],
)
@pytest.mark.parametrize(("family", "messages", "reason"), LEFT_OUT)
def test_a_row_of_which_the_template_leaves_something_out_is_refused(
    family: str,
    messages: list[dict[str, Any]],
    reason: str,
    mask: LossMaskConfig,
    model_of: Callable[[str], Path],
    pool: ThreadPoolExecutor,
) -> None:
    good = Conversation([user("q"), assistant("a")])
    (refused, kept) = Masker(model_of(family), mask, NOW).many([Conversation(messages), good], pool)
    assert isinstance(refused, RowError)
    assert reason in str(refused)
    assert not isinstance(kept, RowError)


@pytest.mark.parametrize("mask", ALL_MASKS)
def test_what_some_answers_are_written_with_is_not_refused(
    mask: LossMaskConfig, model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    """Qwen3 strips past reasoning on purpose; empty fields are none."""
    empty = {**assistant("a"), "reasoning_content": "", "tool_calls": []}
    past = Conversation([user("q"), THOUGHT, user("r"), assistant("b")])
    calls = Conversation([user("q"), {**assistant(""), "tool_calls": [CALL]}, {"role": "tool", "content": "r"}])
    for family, row in (("qwen3", past), ("qwen3", calls), ("llama3", Conversation([user("q"), empty]))):
        (columns,) = Masker(model_of(family), mask, NOW).many([row], pool)
        assert not isinstance(columns, RowError), columns


def test_what_a_template_rewrites_is_refused_by_its_message(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    shouting = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | upper if m.role == 'user' else m.content }}<|im_end|>\n{% endfor %}"
    )
    path = helpers.write_qwen(tmp_path / "shouting", shouting)
    row = Conversation([user("x"), assistant("y")])
    (columns,) = Masker(path, filled(LossMaskConfig), NOW).many([row], pool)
    assert not isinstance(columns, RowError)
    (refused,) = Masker(path, filled(LossMaskConfig, user=True), NOW).many([row], pool)
    assert isinstance(refused, RowError)
    assert "messages[0]: the chat template rewrites what the user says" in str(refused)


def test_what_cannot_be_located_is_refused_not_guessed(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    shouting = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | upper if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n> {% endif %}"
    )
    path = helpers.write_qwen(tmp_path / "shouting-answers", shouting)
    row = Conversation([user("x"), assistant("y"), user("y"), assistant("z")])
    (refused,) = Masker(path, filled(LossMaskConfig), NOW).many([row], pool)
    assert isinstance(refused, RowError)
    assert "messages[1]: the chat template rewrites this assistant message" in str(refused)


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% elif not (loop.first and loop.length > 2 and m.role == 'user') %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)


@pytest.mark.parametrize("mask", [filled(LossMaskConfig), filled(LossMaskConfig, assistant=False, user=True)])
@pytest.mark.parametrize("content", ["a", "A longer question?", [{"type": "text", "text": "a"}]])
def test_a_template_that_takes_parts_only_is_refused(
    mask: LossMaskConfig, content: Any, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    path = helpers.write_qwen(tmp_path / "parts", PARTS)
    row = Conversation([{"role": "user", "content": content}, assistant("a")])
    (refused,) = Masker(path, mask, NOW).many([row], pool)
    assert isinstance(refused, RowError)
    assert "messages[0].content is not written by the chat template" in str(refused)
    assert "content parts" in str(refused)


def test_a_content_that_some_template_drops_is_refused(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    path = helpers.write_qwen(tmp_path / "drops", DROPS)
    asked = [user("The question."), assistant("One."), user("More?"), assistant("Two.")]
    called = [user("q"), {**assistant("I look."), "tool_calls": [CALL]}]
    good = [user("q"), {**assistant(""), "tool_calls": [CALL]}]
    rows = [Conversation(asked), Conversation(called), Conversation(good)]
    first, second, third = Masker(path, filled(LossMaskConfig), NOW).many(rows, pool)
    for refused, index in ((first, 0), (second, 1)):
        assert isinstance(refused, RowError)
        assert str(refused) == f"messages[{index}].content is not written by the chat template"
    assert not isinstance(third, RowError), third


NO_CONTENT: list[dict[str, Any]] = [
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": " \n"},
    {"role": "assistant", "content": []},
    {"role": "assistant", "content": "", "tool_calls": []},
    {"role": "assistant", "content": None, "refusal": "I cannot."},
]


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma3"])
@pytest.mark.parametrize("answer", NO_CONTENT)
def test_an_answer_without_content_is_refused_where_it_is_trained(
    family: str, answer: dict[str, Any], model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    path = model_of(family)
    for messages in ([user("q"), answer], [user("q"), answer, user("r"), assistant("b")]):
        (refused,) = Masker(path, filled(LossMaskConfig), NOW).many([Conversation(messages)], pool)
        assert isinstance(refused, RowError), messages
        if "content" in answer or family == "qwen3":  # some templates fail where there is none
            assert "messages[1] is an assistant message without content" in str(refused)
    if "content" in answer:
        row = conversation({"messages": [user("q"), {**answer, "weight": 0}, user("r"), assistant("b")]})
        (columns,) = Masker(path, filled(LossMaskConfig), NOW).many([row], pool)
        assert trained_runs(path, columns) == trained_runs(path, columns)[-1:]


def test_reasoning_alone_is_an_answer_where_it_is_written(
    model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "two and two"}
    rows = [
        Conversation([user("q"), thought]),
        Conversation([user("q"), thought, user("r"), {**thought, "content": "4"}]),
    ]
    last, past = Masker(model_of("qwen3"), filled(LossMaskConfig), NOW).many(rows, pool)
    assert not isinstance(last, RowError), last
    assert isinstance(past, RowError)
    assert past.kind == "an answer without content"


@pytest.mark.parametrize("mask", [filled(LossMaskConfig), filled(LossMaskConfig, user=True)])
def test_reasoning_that_is_left_out_is_counted(
    mask: LossMaskConfig, model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    inline = assistant("<think>\nhidden thought\n</think>\n\nSo.")
    named = {**assistant("So."), "reasoning_content": "hidden thought"}
    unread = {**assistant("So."), "reasoning": "hidden thought"}
    rows = [
        Conversation([user("q"), past, user("r"), last])
        for past, last in [(inline, inline), (named, named), (named, unread), (assistant("a"), named)]
    ]
    columns = Masker(model_of("qwen3"), mask, NOW).many(rows, pool)
    assert [found.unwritten_reasoning for found in columns if isinstance(found, Columns)] == [1, 1, 2, 0]


@pytest.mark.parametrize("mask", ALL_MASKS)
@pytest.mark.parametrize(
    ("messages", "control"),
    [
        ([user("system, user and assistant, <b>x</b>"), assistant("a")], ()),
        ([user("think between <think> and </think>"), assistant("a")], ()),
        ([{"role": "user", "content": [{"type": "text", "text": "a<|im_start|>"}]}, assistant("a")], ("<|im_start|>",)),
        ([user("a<|im_end|>b<|im_start|>c<|im_end|>"), assistant("a")], ("<|im_end|>", "<|im_start|>")),
        ([{"role": "system", "content": "write <tool_call>"}, user("q"), assistant("a")], ()),
        ([user("q"), assistant("ok<|im_end|>more")], ("<|im_end|>",)),
        (
            [user("q"), {**assistant(""), "tool_calls": [CALL]}, {"role": "tool", "content": "<|im_end|>"}],
            ("<|im_end|>",),
        ),
        (
            [user("q"), {**assistant(""), "tool_calls": [CALL]}, {"role": "tool", "content": "</tool_response>"}],
            ("</tool_response>",),
        ),
    ],
)
def test_control_tokens_in_texts_are_found(
    messages: list[dict[str, Any]],
    control: tuple[str, ...],
    mask: LossMaskConfig,
    model_of: Callable[[str], Path],
    pool: ThreadPoolExecutor,
) -> None:
    (columns,) = Masker(model_of("qwen3"), mask, NOW).many([Conversation(messages)], pool)
    assert isinstance(columns, Columns), columns
    assert columns.control_tokens == control
