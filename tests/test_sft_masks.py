"""Whose tokens are trained, with the real templates of several families, against a slow reference that reads the roles
off the text which `transformers` renders."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
from mask_helpers import ALL_MASKS, trained_runs
from primerl.train.data.conversations import Conversation, RowError
from primerl.train.data.masks import Masker
from primerl.train.sft_settings import LossMaskConfig
from settings_helpers import filled
from sft_helpers import NOW, assistant, user
from transformers import AutoTokenizer

Span = tuple[int, int]
CHATML = r"<\|im_start\|>(?P<role>\w+)\n(?P<body>.*?)(?P<stop><\|im_end\|>)"
# How a turn looks in the text.
FAMILIES = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_instruct_2507": CHATML,
    "lfm2": CHATML,
    "llama3": r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<body>.*?)(?P<stop><\|eot_id\|>)",
    "deepseekv3": (r"<｜(?P<role>User|Assistant)｜>(?P<body>.*?)(?P<stop><｜end▁of▁sentence｜>|(?=<｜Assistant｜>))"),
    "gemma3": r"<start_of_turn>(?P<role>user|model)\n(?P<body>.*?)(?P<stop><end_of_turn>)",
}
WITH_TOOLS = {"qwen2_5", "qwen3", "qwen3_instruct_2507"}
WITHOUT_SYSTEM = {"gemma3", "deepseekv3"}
WORDS = [
    "alpha",
    "Größe",
    "你好",
    "42",
    "don't",
    "👩\u200d👩\u200d👧",
    "{x}",
    "tab\there",
    "line\n\nbreaks",
    "-",
    "item",
    "zürich",
]


def words(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, 6)))


def conversation_of(family: str, seed: int) -> Conversation:
    generator = random.Random(seed)
    messages: list[dict[str, Any]] = []
    if family not in WITHOUT_SYSTEM and generator.random() < 0.6:
        messages.append({"role": "system", "content": words(generator)})
    tools = helpers.TOOLS if family in WITH_TOOLS and generator.random() < 0.5 else None
    kwargs = {}
    if family == "qwen3" and generator.random() < 0.5:
        kwargs = {"enable_thinking": generator.random() < 0.5}
    thinks = family == "qwen3" and kwargs.get("enable_thinking", True)
    for turn in range(generator.randint(1, 4)):
        messages.append(user(words(generator)))
        if tools and generator.random() < 0.6:
            calls = [
                {"id": f"{turn}{n}", "type": "function", "function": {"name": "clock", "arguments": {"n": n}}}
                for n in range(generator.randint(1, 2))
            ]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": words(generator)} for call in calls]
        answer: dict[str, Any] = assistant(words(generator))
        if thinks and generator.random() < 0.6:
            if generator.random() < 0.5:
                answer["content"] = f"<think>\n{words(generator)}\n</think>\n\n{answer['content']}"
            else:
                answer["reasoning_content"] = words(generator)
        messages.append(answer)
    return Conversation(messages, tools, kwargs)


def spans_of(family: str, text: str, row: Conversation, mask: LossMaskConfig) -> list[Span]:
    """Read off the rendered text alone; the contents are looked up only to tell a system prompt from what follows."""
    spans = []
    contents = {role: [m["content"] for m in row.messages if m["role"] == role] for role in ("system", "user")}
    for turn in re.finditer(FAMILIES[family], text, re.DOTALL):
        role, start = turn["role"].lower(), turn.start("body")
        if role in ("assistant", "model"):
            # Without thinking the prompt ends with an empty block, which the model has not to write.
            block = "<think>\n\n</think>\n\n"
            if row.template_kwargs.get("enable_thinking") is False and turn["body"].startswith(block):
                start += len(block)
            if mask.assistant:
                spans.append((start, turn.end("stop")))
        elif "<tool_response>\n" in turn["body"] and role == "user":
            answers = re.finditer(r"<tool_response>\n(.*?)\n</tool_response>", turn["body"], re.DOTALL)
            if mask.tool:
                spans += [(start + answer.start(1), start + answer.end(1)) for answer in answers]
        elif getattr(mask, role) and contents[role]:
            content = contents[role].pop(0)
            assert turn["body"].startswith(content)
            closes = len(content) == len(turn["body"])
            spans.append((start, turn.end("stop") if closes else start + len(content)))
    return spans


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_those_read_off_the_text(
    family: str, model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    path = model_of(family)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [conversation_of(family, seed) for seed in range(40)]
    trained = 0
    for mask in ALL_MASKS:
        for row, columns in zip(rows, Masker(path, mask, NOW).many(rows, pool), strict=True):
            assert not isinstance(columns, RowError), columns
            text = tokenizer.apply_chat_template(row.messages, tools=row.tools, tokenize=False, **row.template_kwargs)
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            spans = spans_of(family, text, row, mask)
            expected = [
                any(start <= first < last <= end for start, end in spans) for first, last in encoded["offset_mapping"]
            ]
            assert memoryview(columns[0]).cast("i").tolist() == encoded["input_ids"]
            assert [bool(bit) for bit in columns[1]] == expected, (mask, text)
            trained += sum(expected)
    assert trained > 1000


def test_past_thinking_that_the_template_strips_is_not_trained(
    model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    path = model_of("qwen3")
    thought = assistant("<think>\nhm\n</think>\n\nSo.")
    row = Conversation([user("Why?"), thought, user("And?"), thought])
    (columns,) = Masker(path, filled(LossMaskConfig, user=True), NOW).many([row], pool)
    assert trained_runs(path, columns) == [
        "Why?<|im_end|>",
        "So.<|im_end|>",
        "And?<|im_end|>",
        "<think>\nhm\n</think>\n\nSo.<|im_end|>",
    ]


def test_empty_thinking_between_two_answers_is_not_trained(
    model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    """The prompt of the second is not how the row begins: there the first is last, with empty thinking of its own. So
    nothing proves who wrote the thinking before the second's content."""
    path = model_of("qwen3")
    row = Conversation([user("q"), assistant("a"), assistant("b")])
    (columns,) = Masker(path, filled(LossMaskConfig), NOW).many([row], pool)
    assert trained_runs(path, columns) == ["a<|im_end|>", "b<|im_end|>"]
    (columns,) = Masker(path, filled(LossMaskConfig), NOW).many([Conversation(row.messages[:2])], pool)
    assert trained_runs(path, columns) == ["<think>\n\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize("mask", ALL_MASKS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_developer_is_the_system_where_the_template_knows_only_that(
    family: str, mask: LossMaskConfig, model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    rows = [
        Conversation([{"role": role, "content": "Be brief."}, user("q"), assistant("a")])
        for role in ("developer", "system")
    ]
    if family == "gemma3":  # It writes the system's words into the user's message.
        mask = filled(LossMaskConfig, assistant=mask.assistant)
    developer, system = Masker(model_of(family), mask, NOW).many(rows, pool)
    assert not isinstance(developer, RowError), developer
    assert developer == system


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma3"])
def test_parts_of_a_content_are_lines(family: str, model_of: Callable[[str], Path], pool: ThreadPoolExecutor) -> None:
    """As the gateway gives them to templates, whether or not these know parts."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rows = [Conversation([user(""), assistant("a")]) for _ in range(2)]
    rows[0].messages[0]["content"] = parts
    rows[1].messages[0]["content"] = "one\ntwo"
    of_parts, of_text = Masker(model_of(family), filled(LossMaskConfig, user=True), NOW).many(rows, pool)
    assert of_parts == of_text
    assert trained_runs(model_of(family), of_parts)[0].startswith("one\ntwo<")


def test_rows_alike_and_unlike_are_rendered_in_their_order(
    model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    """Groups with the same tools and variables go in one call; a row that fails fails alone."""
    masker = Masker(model_of("qwen3"), filled(LossMaskConfig), NOW)
    rows = [conversation_of("qwen3", seed) for seed in range(30)]
    assert len({str((row.tools, row.template_kwargs)) for row in rows}) > 3
    bad = Conversation([user("x"), {"role": "assistant", "content": [{"type": "image_url"}]}])
    mixed = [*rows[:7], bad, *rows[7:]]
    together = masker.many(mixed, pool)
    assert isinstance(together[7], RowError)
    assert together[7].kind == "the chat template refuses it"
    assert not [columns for columns in [*together[:7], *together[8:]] if isinstance(columns, RowError)]
    assert [*together[:7], *together[8:]] == [masker.many([row], pool)[0] for row in rows]


def test_the_day_is_the_runs_own(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template = "{{ strftime_now('%Y') }}" + turns
    path = helpers.write_qwen(tmp_path / "dated", template)
    row = [Conversation([user("a"), assistant("b")])]
    (then,) = Masker(path, filled(LossMaskConfig), 1e9).many(row, pool)
    (later,) = Masker(path, filled(LossMaskConfig), 1.7e9).many(row, pool)
    assert then != later
    assert then == Masker(path, filled(LossMaskConfig), 1e9 + 60).many(row, pool)[0]
