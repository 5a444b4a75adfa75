"""Whose tokens are trained, with the real templates of several families, against a slow reference that reads the roles
off the text which `transformers` renders."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
from primerl.train.conversations import Conversation, RowError, conversation
from primerl.train.masks import Columns, Masker
from primerl.train.sft_config import LossMaskConfig
from sft_helpers import NOW, assistant, user
from transformers import AutoTokenizer

Span = tuple[int, int]
CHATML = r"<\|im_start\|>(?P<role>\w+)\n(?P<body>.*?)(?P<stop><\|im_end\|>)"
# Template, the stop token of its family, and how a turn looks in the text.
FAMILIES: dict[str, tuple[str, str]] = {
    "qwen2_5": ("<|im_end|>", CHATML),
    "qwen3": ("<|im_end|>", CHATML),
    "qwen3_instruct_2507": ("<|im_end|>", CHATML),
    "lfm2": ("<|im_end|>", CHATML),
    "llama3": (
        "<|eot_id|>",
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<body>.*?)(?P<stop><\|eot_id\|>)",
    ),
    "deepseekv3": (
        "<｜end▁of▁sentence｜>",
        r"<｜(?P<role>User|Assistant)｜>(?P<body>.*?)(?P<stop><｜end▁of▁sentence｜>|(?=<｜Assistant｜>))",
    ),
    "gemma3": ("<end_of_turn>", r"<start_of_turn>(?P<role>user|model)\n(?P<body>.*?)(?P<stop><end_of_turn>)"),
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
ALL_MASKS = [
    LossMaskConfig(),
    LossMaskConfig(user=True),
    LossMaskConfig(system=True, tool=True),
    LossMaskConfig(assistant=False, system=True, user=True, tool=True),
    LossMaskConfig(system=True, user=True, tool=True),
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
    for turn in re.finditer(FAMILIES[family][1], text, re.DOTALL):
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model_of(folder: Path) -> Callable[[str], Path]:
    def write(family: str) -> Path:
        path = folder / family
        if not path.exists():
            helpers.write_family(path, helpers.trl_template(family), [FAMILIES[family][0]])
        return path

    return write


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


def trained_runs(path: Path, columns: Columns | RowError) -> list[str]:
    """Stretches of tokens that are trained."""
    assert not isinstance(columns, RowError), columns
    ids = memoryview(columns[0]).cast("i").tolist()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [
        tokenizer.decode([token for token, _ in run])
        for trained, run in itertools.groupby(zip(ids, columns[1], strict=True), key=lambda pair: pair[1])
        if trained
    ]


def test_past_thinking_that_the_template_strips_is_not_trained(
    model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    path = model_of("qwen3")
    thought = assistant("<think>\nhm\n</think>\n\nSo.")
    row = Conversation([user("Why?"), thought, user("And?"), thought])
    (columns,) = Masker(path, LossMaskConfig(user=True), NOW).many([row], pool)
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
    (columns,) = Masker(path, LossMaskConfig(), NOW).many([row], pool)
    assert trained_runs(path, columns) == ["a<|im_end|>", "b<|im_end|>"]
    (columns,) = Masker(path, LossMaskConfig(), NOW).many([Conversation(row.messages[:2])], pool)
    assert trained_runs(path, columns) == ["<think>\n\n</think>\n\na<|im_end|>"]


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"n": 1}}}
THOUGHT = {**assistant("a"), "reasoning_content": "hm"}
LEFT_OUT: list[tuple[str, list[dict[str, Any]], str]] = [
    ("qwen3", [{"role": "human", "content": "X"}, user("q"), assistant("a")], 'messages[0].role is "human"'),
    ("qwen3", [user("q"), {"role": "function", "content": "X"}, assistant("a")], 'messages[1].role is "function"'),
    ("llama3", [{"role": "User", "content": "X"}, assistant("a")], 'messages[0].role is "User"'),
    ("llama3", [user("q"), {**assistant(""), "tool_calls": [CALL]}], "messages[1].tool_calls are not written"),
    ("gemma3", [user("q"), {**assistant("a"), "tool_calls": [CALL]}], "messages[1].tool_calls are not written"),
    ("qwen2_5", [user("q"), THOUGHT, user("r"), assistant("b")], "messages[1].reasoning_content is not written"),
]


@pytest.mark.parametrize(
    "mask", [LossMaskConfig(), LossMaskConfig(user=True), LossMaskConfig(user=True, assistant=False)]
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
        mask = LossMaskConfig(assistant=mask.assistant)
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
    of_parts, of_text = Masker(model_of(family), LossMaskConfig(user=True), NOW).many(rows, pool)
    assert of_parts == of_text
    assert trained_runs(model_of(family), of_parts)[0].startswith("one\ntwo<")


def test_rows_alike_and_unlike_are_rendered_in_their_order(
    model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    """Groups with the same tools and variables go in one call; a row that fails fails alone."""
    masker = Masker(model_of("qwen3"), LossMaskConfig(), NOW)
    rows = [conversation_of("qwen3", seed) for seed in range(30)]
    assert len({str((row.tools, row.template_kwargs)) for row in rows}) > 3
    bad = Conversation([user("x"), {"role": "assistant", "content": [{"type": "image_url"}]}])
    mixed = [*rows[:7], bad, *rows[7:]]
    together = masker.many(mixed, pool)
    assert isinstance(together[7], RowError)
    assert together[7].kind == "the chat template refuses it"
    assert not [columns for columns in [*together[:7], *together[8:]] if isinstance(columns, RowError)]
    assert [*together[:7], *together[8:]] == [masker.many([row], pool)[0] for row in rows]


def test_the_day_is_the_runs_own(folder: Path, pool: ThreadPoolExecutor) -> None:
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template = "{{ strftime_now('%Y') }}" + turns
    path = helpers.write_qwen(folder / "dated", template)
    row = [Conversation([user("a"), assistant("b")])]
    (then,) = Masker(path, LossMaskConfig(), 1e9).many(row, pool)
    (later,) = Masker(path, LossMaskConfig(), 1.7e9).many(row, pool)
    assert then != later
    assert then == Masker(path, LossMaskConfig(), 1e9 + 60).many(row, pool)[0]


def test_what_a_template_rewrites_is_refused_by_its_message(folder: Path, pool: ThreadPoolExecutor) -> None:
    shouting = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | upper if m.role == 'user' else m.content }}<|im_end|>\n{% endfor %}"
    )
    path = helpers.write_qwen(folder / "shouting", shouting)
    row = Conversation([user("x"), assistant("y")])
    (columns,) = Masker(path, LossMaskConfig(), NOW).many([row], pool)
    assert not isinstance(columns, RowError)
    (refused,) = Masker(path, LossMaskConfig(user=True), NOW).many([row], pool)
    assert isinstance(refused, RowError)
    assert "messages[0]: the chat template rewrites what the user says" in str(refused)


def test_what_cannot_be_located_is_refused_not_guessed(folder: Path, pool: ThreadPoolExecutor) -> None:
    shouting = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | upper if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n> {% endif %}"
    )
    path = helpers.write_qwen(folder / "shouting-answers", shouting)
    row = Conversation([user("x"), assistant("y"), user("y"), assistant("z")])
    (refused,) = Masker(path, LossMaskConfig(), NOW).many([row], pool)
    assert isinstance(refused, RowError)
    assert "messages[1]: the chat template rewrites this assistant message" in str(refused)


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
    marked, unmarked = Masker(path, LossMaskConfig(), NOW).many([row, plain], pool)
    assert not isinstance(marked, RowError), marked
    assert not isinstance(unmarked, RowError), unmarked
    assert marked[0] == unmarked[0], "the template is given the same"
    assert trained_runs(path, marked) == trained_runs(path, unmarked)[1:]


def test_marks_are_for_every_role(model_of: Callable[[str], Path], pool: ThreadPoolExecutor) -> None:
    messages = [{**user("q"), "weight": 0}, assistant("a"), user("r"), {**assistant("b"), "weight": 0}]
    path = model_of("qwen3")
    (columns,) = Masker(path, LossMaskConfig(user=True), NOW).many([conversation({"messages": messages})], pool)
    assert trained_runs(path, columns) == ["a<|im_end|>", "r<|im_end|>"]


def test_whose_tokens_are_whose_is_not_guessed(folder: Path, pool: ThreadPoolExecutor) -> None:
    joined = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
        "<|im_start|>{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    path = helpers.write_qwen(folder / "joined", joined)
    messages = [user("q"), assistant("a"), {**assistant("b"), "weight": 0}]
    (refused,) = Masker(path, LossMaskConfig(), NOW).many([conversation({"messages": messages})], pool)
    assert isinstance(refused, RowError)
    assert "messages[2] is marked as not trained" in str(refused)


@pytest.mark.parametrize("marked", [1, 3])
def test_answers_of_several_stretches_and_of_none_are_not_mixed_up(
    marked: int, folder: Path, pool: ThreadPoolExecutor
) -> None:
    """As many stretches as answers: two of the first answer, around what the template says, and none of the second."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content %}"
        "{% generation %}{{ m.reasoning_content }}<|im_end|>{% endgeneration %}<|im_start|>said\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    path = helpers.write_qwen(folder / f"several{marked}", template)
    messages = [user("q"), {**assistant("first"), "reasoning_content": "hm"}, user("r"), assistant("second")]
    messages[marked] = {**messages[marked], "weight": 0}
    (refused,) = Masker(path, LossMaskConfig(), NOW).many([conversation({"messages": messages})], pool)
    assert isinstance(refused, RowError), refused
    assert f"messages[{marked}] is marked as not trained" in str(refused)


HARMLESS: list[dict[str, Any]] = [
    {"name": "ann", "refusal": None, "audio": None, "function_call": None},
    {"tool_calls": None, "tool_call_id": None, "annotations": [{"x": 1}], "id": "7"},
    {"reasoning": "hm", "thinking": "hm", "reasoning_details": [{"text": "hm"}], "refusal": "no"},
    {"wieght": None, "images": [], "extra": {}},
]


@pytest.mark.parametrize("mask", [LossMaskConfig(), LossMaskConfig(user=True)])
def test_fields_that_would_be_ignored_are_refused(
    mask: LossMaskConfig, folder: Path, model_of: Callable[[str], Path], pool: ThreadPoolExecutor
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
        path = helpers.write_qwen(folder / f"fields-{name}", template)
        (found,) = Masker(path, LossMaskConfig(), NOW).many([rows[len(HARMLESS)]], pool)
        assert not isinstance(found, RowError), (name, found)


UNKNOWN_FIELDS: list[tuple[str, Any]] = [
    ("wieght", 0),
    ("function_call", {"name": "f", "arguments": "{}"}),
    ("audio", {"id": "a"}),
    ("images", ["a.png"]),
]


@pytest.mark.parametrize("value", [0.5, 2, "0", [1], -1])
def test_a_mark_that_means_nothing_is_refused(value: Any) -> None:
    with pytest.raises(RowError, match=r"messages\[1\]\.weight is .*; it must be 0 or 1"):
        conversation({"messages": [user("q"), {**assistant("a"), "weight": value}]})


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


@pytest.mark.parametrize("mask", [LossMaskConfig(), LossMaskConfig(assistant=False, user=True)])
@pytest.mark.parametrize("content", ["a", "A longer question?", [{"type": "text", "text": "a"}]])
def test_a_template_that_takes_parts_only_is_refused(
    mask: LossMaskConfig, content: Any, folder: Path, pool: ThreadPoolExecutor
) -> None:
    path = helpers.write_qwen(folder / "parts", PARTS)
    row = Conversation([{"role": "user", "content": content}, assistant("a")])
    (refused,) = Masker(path, mask, NOW).many([row], pool)
    assert isinstance(refused, RowError)
    assert "messages[0].content is not written by the chat template" in str(refused)
    assert "content parts" in str(refused)


def test_a_content_that_some_template_drops_is_refused(folder: Path, pool: ThreadPoolExecutor) -> None:
    path = helpers.write_qwen(folder / "drops", DROPS)
    asked = [user("The question."), assistant("One."), user("More?"), assistant("Two.")]
    called = [user("q"), {**assistant("I look."), "tool_calls": [CALL]}]
    good = [user("q"), {**assistant(""), "tool_calls": [CALL]}]
    rows = [Conversation(asked), Conversation(called), Conversation(good)]
    first, second, third = Masker(path, LossMaskConfig(), NOW).many(rows, pool)
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
        (refused,) = Masker(path, LossMaskConfig(), NOW).many([Conversation(messages)], pool)
        assert isinstance(refused, RowError), messages
        if "content" in answer or family == "qwen3":  # some templates fail where there is none
            assert "messages[1] is an assistant message without content" in str(refused)
    if "content" in answer:
        row = conversation({"messages": [user("q"), {**answer, "weight": 0}, user("r"), assistant("b")]})
        (columns,) = Masker(path, LossMaskConfig(), NOW).many([row], pool)
        assert trained_runs(path, columns) == trained_runs(path, columns)[-1:]


def test_reasoning_alone_is_an_answer_where_it_is_written(
    model_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "two and two"}
    rows = [
        Conversation([user("q"), thought]),
        Conversation([user("q"), thought, user("r"), {**thought, "content": "4"}]),
    ]
    last, past = Masker(model_of("qwen3"), LossMaskConfig(), NOW).many(rows, pool)
    assert not isinstance(last, RowError), last
    assert isinstance(past, RowError)
    assert past.kind == "an answer without content"


@pytest.mark.parametrize("mask", [LossMaskConfig(), LossMaskConfig(user=True)])
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
