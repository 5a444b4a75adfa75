"""Generated conversations with everything that chat templates look at, for the golden tests of the renderer.

`case(seed)` is the same for ever: a difference that a test reports can be looked at again.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

WORDS = [
    "Reverse: qwxyz", "<r>zyx</r>", "Größe", "naïve e\u0301cole", "你好,世界", "👩‍👩‍👧 family", "  two  spaces ",
    "tab\there", "line\n\nbreaks\n", "12345 + 0.5", "don't", 'say "x"', "user", "<|im_end|>", "</think>", "<think>",
    "{'a': \"b\"}", "a < b & c > d", "مرحبا", "\u00a0nbsp", "x" * 40, "", "{{ messages }}", "{% if x %}", "\r\n",
    "ﬁ Ⅷ", "- item\n- item", "<b>", "\x1cfs", "\x85nel", "\u2028ls", "\u200b", "ẞß", "İi", "[TOOL_CALLS]", "</s>",
    "<tool_call>", "/no_think", "/nothink", "\\n \\u00e9", "%s %d", "\x7f", "\ufeffbom", "𝔘𝔫𝔦", "None", "3.0",
]  # fmt: skip
ARGUMENT_VALUES: list[Any] = [
    "Zürich", 'a"b\'', "", "line\nbreak", 2, 0, -7, 2.5, 2.0, 1e-7, 1e16, 9007199254740993, True, False, None, [], {},
    [1, 2.5, None, True, "x"], {"x": {"y": [{}]}}, {"items": [1], "keys": "k"}, [["é", "\u2028"], []], "12", "true",
]  # fmt: skip
KWARGS: list[dict[str, Any]] = [
    {"enable_thinking": False}, {"enable_thinking": True}, {"reasoning_effort": "low"}, {"reasoning_effort": "high"},
    {"preserve_thinking": True}, {"clear_thinking": False}, {"thinking": True}, {"thinking": False},
    {"date_string": "26 Jul 2024"}, {"tools_in_user_message": False}, {"model_identity": "You are Größe."},
    {"builtin_tools": ["python", "browser"]}, {"truncate_history_thinking": False}, {"low_effort": True},
    {"enable_thinking": True, "reasoning_effort": "medium"}, {"citation_mode": "fast"}, {"safety_mode": "NONE"},
]  # fmt: skip


def tool(name: str, description: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool(
        "get_weather",
        'The weather <today> & "tomorrow" – it\'s free',
        {
            "city": {"type": "string", "description": "Größe\nin two lines"},
            "days": {"type": "integer", "minimum": 1, "default": 3},
            "limit": {"type": "number", "maximum": 1e-7, "nullable": True},
        },
        required=["city"],
    ),
    tool("clock", "", {}),
    tool(
        "search",
        "Finds 世界",
        {
            "items": {"type": "array", "items": {"type": "string", "enum": ["a", "b", 'c"']}},
            "get": {"type": ["string", "null"], "description": "A property that is named like a method."},
            "filter": {
                "type": "object",
                "properties": {"any": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "deep": {"type": "array"}},
                "required": ["any"],
                "additionalProperties": False,
            },
        },
        required=["items", "filter"],
        additionalProperties=False,
    ),
    tool("flags", "Yes or no", {"on": {"type": "boolean", "default": True}, "level": {"enum": [1, 2]}}),
    {"type": "function", "function": {"name": "bare", "description": "No parameters at all"}},
]
DOCUMENTS = [
    [{"title": "Größe", "text": "1.80 m\n\nmeasured"}],
    [{"title": "a", "text": "x"}, {"title": "b", "text": 'say "y"', "url": "http://x", "n": 1.5}],
]


@dataclass
class Case:
    """What is given to a template; `tools` and `documents` may be None or empty, which some templates tell apart."""

    messages: list[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    generate: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0


def text(random_: random.Random) -> str:
    return random_.choice([" ", "\n", ""]).join(random_.choices(WORDS, k=random_.randint(1, 5)))


def arguments(random_: random.Random) -> dict[str, Any]:
    names = random_.sample(["city", "days", "items", "nested", "größe", "a b", "get", "x"], random_.randint(0, 3))
    return {name: random_.choice(ARGUMENT_VALUES) for name in names}


def calling(random_: random.Random, turn: int, *, as_text: bool) -> list[Message]:
    """A message with calls, and their results."""
    calls = []
    for index in range(random_.choice([1, 1, 1, 2, 3])):
        given: Any = arguments(random_)
        function = {"name": random_.choice(["get_weather", "clock", "search"]), "arguments": given}
        if as_text:
            function["arguments"] = json.dumps(given, ensure_ascii=random_.random() < 0.5)
        call: Message = {"id": f"call{turn:04}{index}", "type": "function", "function": function}
        if random_.random() < 0.1:
            call["index"] = index
        calls.append(call)
    message: Message = {"role": "assistant", "content": random_.choice([None, "", "I look.", text(random_)])}
    if random_.random() < 0.15:
        del message["content"]
    message["tool_calls"] = calls
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result(random_)}
        for call in calls
    ]
    return [reasoned(random_, message, 0.4), *results]


def result(random_: random.Random) -> str:
    return random_.choice([text(random_), json.dumps({"r": random_.choice(ARGUMENT_VALUES)}), ""])


def reasoned(random_: random.Random, message: Message, share: float) -> Message:
    if random_.random() >= share:
        return message
    kind = random_.choice(["reasoning_content", "reasoning_content", "reasoning_content", "thinking", "inline"])
    if kind != "inline":
        message[kind] = text(random_)
    elif isinstance(message.get("content"), str):
        message["content"] = f"<think>\n{text(random_)}\n</think>\n\n{message['content']}"
    return message


def case(seed: int) -> Case:
    random_ = random.Random(seed)
    # A third is plain: some templates know neither tools nor system messages nor reasoning.
    plain = seed % 3 == 0
    as_text = seed % 5 == 4
    messages: list[Message] = []
    if random_.random() < (0.1 if plain else 0.5):
        messages.append({"role": random_.choice(["system", "system", "developer"]), "content": text(random_)})
    tools_used = not plain and random_.random() < 0.7
    for turn in range(random_.randint(1, 4)):
        messages.append({"role": "user", "content": text(random_)})
        while tools_used and random_.random() < 0.45:
            messages.extend(calling(random_, turn, as_text=as_text))
        messages.append(reasoned(random_, {"role": "assistant", "content": text(random_)}, 0 if plain else 0.4))
    if random_.random() < 0.65:
        messages.pop()
    if not plain and random_.random() < 0.04:
        messages.insert(len(messages) // 2, {"role": "system", "content": text(random_)})
    tools: list[Any] | None = None
    if tools_used or random_.random() < 0.1:
        tools = random_.sample(TOOLS, random_.randint(1, len(TOOLS)))
    elif random_.random() < 0.2:
        tools = []
    kwargs: dict[str, Any] = dict(random_.choice(KWARGS)) if random_.random() < 0.5 else {}
    documents = random_.choice([[], *DOCUMENTS]) if random_.random() < 0.15 else None
    return Case(messages, tools, documents, random_.random() < 0.6, kwargs, float(random_.randint(0, 2**31)))


def parsed_arguments(messages: list[Message]) -> list[Message]:
    """The conversation with the text of arguments (OpenAI's wire) as mappings, which most templates want."""

    def call(item: Message) -> Message:
        function = item["function"]
        given = function["arguments"]
        return {**item, "function": {**function, "arguments": json.loads(given) if isinstance(given, str) else given}}

    return [
        {**message, "tool_calls": [call(item) for item in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
