"""Fields of a message: marks of what is trained, and fields that would be ignored without a word."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
from mask_helpers import trained_runs
from primerl.train.data.conversations import Conversation, RowError, conversation
from primerl.train.data.masks import Masker
from primerl.train.sft_settings import LossMaskConfig
from settings_helpers import filled
from sft_helpers import NOW, assistant, user

MARKS = [{"weight": 0}, {"weight": 0.0}, {"trainable": False}, {"loss": False}, {"loss_mask": 0}, {"train": False}]
MARKS += [{"training": False}, {"masked": True}, {"weight": 1, "loss": False}]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma3"])
def test_a_message_that_is_marked_is_not_trained(
    family: str, mark: dict[str, Any], model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    messages = [user("q"), {**assistant("WRONG"), **mark}, user("sure?"), {**assistant("right"), "weight": 1}]
    row = conversation({"messages": messages})
    plain = Conversation([user("q"), assistant("WRONG"), user("sure?"), assistant("right")])
    path = model_of(family)
    marked, unmarked = Masker(path, filled(LossMaskConfig), NOW).many([row, plain], pool)
    assert not isinstance(marked, RowError), marked
    assert not isinstance(unmarked, RowError), unmarked
    assert marked[0] == unmarked[0], "the template is given the same"
    assert trained_runs(path, marked) == trained_runs(path, unmarked)[1:]


def test_marks_are_for_every_role(model_of: Callable[[str], Path], pool: ThreadPoolExecutor) -> None:
    messages = [{**user("q"), "weight": 0}, assistant("a"), user("r"), {**assistant("b"), "weight": 0}]
    path = model_of("qwen3")
    (columns,) = Masker(path, filled(LossMaskConfig, user=True), NOW).many([conversation({"messages": messages})], pool)
    assert trained_runs(path, columns) == ["a<|im_end|>", "r<|im_end|>"]


def test_whose_tokens_are_whose_is_not_guessed(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    joined = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
        "<|im_start|>{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    path = helpers.write_qwen(tmp_path / "joined", joined)
    messages = [user("q"), assistant("a"), {**assistant("b"), "weight": 0}]
    (refused,) = Masker(path, filled(LossMaskConfig), NOW).many([conversation({"messages": messages})], pool)
    assert isinstance(refused, RowError)
    assert "messages[2] is marked as not trained" in str(refused)


@pytest.mark.parametrize("marked", [1, 3])
def test_answers_of_several_stretches_and_of_none_are_not_mixed_up(
    marked: int, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """As many stretches as answers: two of the first answer, around what the template says, and none of the second."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content %}"
        "{% generation %}{{ m.reasoning_content }}<|im_end|>{% endgeneration %}<|im_start|>said\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    path = helpers.write_qwen(tmp_path / f"several{marked}", template)
    messages = [user("q"), {**assistant("first"), "reasoning_content": "hm"}, user("r"), assistant("second")]
    messages[marked] = {**messages[marked], "weight": 0}
    (refused,) = Masker(path, filled(LossMaskConfig), NOW).many([conversation({"messages": messages})], pool)
    assert isinstance(refused, RowError), refused
    assert f"messages[{marked}] is marked as not trained" in str(refused)


@pytest.mark.parametrize("value", [0.5, 2, "0", [1], -1])
def test_a_mark_that_means_nothing_is_refused(value: Any) -> None:
    with pytest.raises(RowError, match=r"messages\[1\]\.weight is .*; it must be 0 or 1"):
        conversation({"messages": [user("q"), {**assistant("a"), "weight": value}]})


HARMLESS: list[dict[str, Any]] = [
    {"name": "ann", "refusal": None, "audio": None, "function_call": None},
    {"tool_calls": None, "tool_call_id": None, "annotations": [{"x": 1}], "id": "7"},
    {"reasoning": "hm", "thinking": "hm", "reasoning_details": [{"text": "hm"}], "refusal": "no"},
    {"wieght": None, "images": [], "extra": {}},
]
UNKNOWN_FIELDS: list[tuple[str, Any]] = [
    ("wieght", 0),
    ("function_call", {"name": "f", "arguments": "{}"}),
    ("audio", {"id": "a"}),
    ("images", ["a.png"]),
]


@pytest.mark.parametrize("mask", [filled(LossMaskConfig), filled(LossMaskConfig, user=True)])
def test_fields_that_would_be_ignored_are_refused(
    mask: LossMaskConfig, tmp_path: Path, model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    rows = [Conversation([user("q"), {**assistant("a"), **fields}]) for fields in HARMLESS]
    rows += [Conversation([user("q"), {**assistant("a"), name: value}]) for name, value in UNKNOWN_FIELDS]
    columns = Masker(model_of("llama3"), mask, NOW).many(rows, pool)
    assert not [found for found in columns[: len(HARMLESS)] if isinstance(found, RowError)]
    for (name, _), refused in zip(UNKNOWN_FIELDS, columns[len(HARMLESS) :], strict=True):
        assert isinstance(refused, RowError), name
        assert f"messages[1].{name} is unknown" in str(refused)
    names = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.wieght == 9 %}!{% endif %}{{ m.content }}<|im_end|>"
        "{% endfor %}"
    )
    writes = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{{ m | tojson }}<|im_end|>{% endfor %}"
    for name, template in (("names", names), ("writes", writes)):
        path = helpers.write_qwen(tmp_path / f"fields-{name}", template)
        (found,) = Masker(path, filled(LossMaskConfig), NOW).many([rows[len(HARMLESS)]], pool)
        assert not isinstance(found, RowError), (name, found)
