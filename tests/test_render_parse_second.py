"""A second opinion on answers: the parsers of the `renderers` package."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import render_helpers as helpers
from primerl.render import Renderer
from renderers import parsing
from renderers.base import ParsedResponse, ToolCallParseStatus
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Second(NamedTuple):
    """A family in the `renderers` package."""

    parser: Callable[..., ParsedResponse]
    # Names of its parameters that are token ids, and the tokens.
    tokens: dict[str, str]
    options: tuple[str, ...] = ("prefilled_thinking",)
    prompt: str = ""


THINK = {"think_id": "<think>", "think_end_id": "</think>"}
CALL = {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}
SECOND = {
    "hermes": Second(parsing.parse_qwen3, {**CALL, "reasoning_end_id": "</think>"}),
    "qwen3_coder": Second(parsing.parse_qwen35, {**THINK, **CALL}, ("tools", "prefilled_thinking")),
    "glm": Second(
        parsing.parse_glm,
        {
            **THINK,
            **CALL,
            "arg_key_id": "<arg_key>",
            "arg_key_end_id": "</arg_key>",
            "arg_value_id": "<arg_value>",
            "arg_value_end_id": "</arg_value>",
        },
        ("tools", "prefilled_thinking"),
    ),
    "kimi": Second(
        parsing.parse_kimi_k2,
        {
            "tool_calls_section_begin_id": "<|tool_calls_section_begin|>",
            "tool_calls_section_end_id": "<|tool_calls_section_end|>",
            "tool_call_begin_id": "<|tool_call_begin|>",
            "tool_call_argument_begin_id": "<|tool_call_argument_begin|>",
            "tool_call_end_id": "<|tool_call_end|>",
        },
    ),
    "deepseek": Second(
        parsing.parse_deepseek_v3,
        {
            "tool_calls_begin_id": "<｜tool▁calls▁begin｜>",
            "tool_calls_end_id": "<｜tool▁calls▁end｜>",
            "tool_call_begin_id": "<｜tool▁call▁begin｜>",
            "tool_call_end_id": "<｜tool▁call▁end｜>",
            "tool_sep_id": "<｜tool▁sep｜>",
        },
    ),
    "minimax": Second(
        parsing.parse_minimax,
        {**THINK, "tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"},
        ("tools", "prefilled_thinking"),
    ),
    "llama3_json": Second(parsing.parse_llama_3, {}, ()),
    "harmony": Second(
        parsing.parse_gpt_oss,
        {
            "return_id": "<|return|>",
            "call_id": "<|call|>",
            "start_id": "<|start|>",
            "end_id": "<|end|>",
            "channel_id": "<|channel|>",
            "message_id": "<|message|>",
            "constrain_id": "<|constrain|>",
        },
        (),
        # It wants whole messages; ours knows that the prompt began the first one.
        "<|start|>assistant",
    ),
}


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_calls(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Tool calls in a family's canonical form."""
    dumped = [(name, arguments, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    match family:
        case "hermes":
            return "".join(
                f'\n<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, _, text in dumped
            )
        case "qwen3_coder":
            return "".join(
                f"\n<tool_call>\n<function={name}>\n"
                + "".join(f"<parameter={k}>\n{written(v)}\n</parameter>\n" for k, v in arguments.items())
                + "</function>\n</tool_call>"
                for name, arguments, _ in dumped
            )
        case "glm":
            return "".join(
                f"\n<tool_call>{name}\n"
                + "".join(
                    f"<arg_key>{k}</arg_key>\n<arg_value>{written(v)}</arg_value>\n" for k, v in arguments.items()
                )
                + "</tool_call>"
                for name, arguments, _ in dumped
            )
        case "kimi":
            inner = "".join(
                f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
                for at, (name, _, text) in enumerate(dumped)
            )
            return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
        case "deepseek":
            inner = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
                for name, _, text in dumped
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "minimax":
            inner = "".join(
                f'<invoke name="{name}">\n'
                + "".join(f'<parameter name="{k}">{written(v)}</parameter>\n' for k, v in arguments.items())
                + "</invoke>\n"
                for name, arguments, _ in dumped
            )
            return f"\n<minimax:tool_call>\n{inner}</minimax:tool_call>"
        case "llama3_json":
            return f'{{"name": "{dumped[0][0]}", "parameters": {dumped[0][2]}}}'
        case "harmony":
            return "".join(
                f"<|start|>assistant to=functions.{name}<|channel|>commentary <|constrain|>json"
                f"<|message|>{text}<|call|>"
                for name, _, text in dumped
            )
    raise AssertionError(family)


class Case(NamedTuple):
    text: str
    starts_in_reasoning: bool


def corpus(family: str, seed: int) -> Case:
    """A well-formed answer."""
    random_ = random.Random(seed)
    reasoning = random_.choice([None, "Hm.\n\nSo é.", "I could write </tool_call> or {x}."])
    content = random_.choice(["", "I look.", "a < b\n\nc & 你好 {f} [g]"])
    possible = [{"city": "Zürich", "days": 2}, {"city": 'a "b" <c>\nd'}, {}, {"days": -1, "limit": 0.5}]
    calls = [("get_weather", random_.choice(possible)) for _ in range(random_.choice([0, 1, 1, 2]))]
    starts_in_reasoning = reasoning is not None and family not in ("llama3_json", "harmony") and random_.random() < 0.5
    if family == "harmony":
        text = f"<|channel|>analysis<|message|>{reasoning}<|end|>" if reasoning else ""
        text += f"<|start|>assistant<|channel|>final<|message|>{content}<|end|>" if content else ""
        text = (text + (write_calls(family, calls) if calls else "")).removeprefix("<|start|>assistant")
    elif family == "llama3_json":
        text = write_calls(family, calls) if calls else content
    else:
        opened = "" if starts_in_reasoning else "<think>\n"
        text = f"{opened}{reasoning}\n</think>\n\n" if reasoning else ""
        text += content + (write_calls(family, calls) if calls else "")
    return Case(text, starts_in_reasoning)


class Both:
    """A family's parsers, ours and theirs, over one tokenizer."""

    def __init__(self, folder: Path, family: str) -> None:
        self.second = SECOND[family]
        special = sorted({*self.second.tokens.values(), *THINK.values(), "<|im_end|>"})
        tokenizer = helpers.trained_tokenizer(helpers.QWEN_SPLIT, special, [], nfc=False)
        model = helpers.write_model(folder / f"second_{family}", tokenizer, helpers.CHATML, eos_token="<|im_end|>")
        reasoning = {"harmony": "harmony", "llama3_json": "none"}.get(family, "think")
        self.ours = Renderer(model, tool_parser=family, reasoning_parser=reasoning)
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def theirs(self, case: Case) -> ParsedResponse:
        ids = self.tokenizer.encode(self.second.prompt + case.text, add_special_tokens=False)
        tokens = {name: self.tokenizer.convert_tokens_to_ids(token) for name, token in self.second.tokens.items()}
        options = {"tools": helpers.TOOLS, "prefilled_thinking": case.starts_in_reasoning}
        if self.second.parser is not parsing.parse_gpt_oss:
            tokens["stop_ids"] = set(self.ours.stop_token_ids)
        return self.second.parser(
            self.tokenizer, ids, **tokens, **{name: options[name] for name in self.second.options}
        )


def difference(both: Both, case: Case) -> str | None:
    """What the two say differently about an answer."""
    ours = both.ours.parse_answer(both.ours.encode(case.text), helpers.TOOLS, case.starts_in_reasoning)
    theirs = both.theirs(case)
    their_calls = [(call.name, call.arguments) for call in theirs.tool_calls if call.status == ToolCallParseStatus.OK]
    if helpers.calls_of(ours.message) != their_calls:
        return f"calls {helpers.calls_of(ours.message)} {their_calls}"
    # They drop the text of a call that cannot be read.
    attempts = [call for call in theirs.tool_calls if call.status != ToolCallParseStatus.OK]
    if bool(ours.malformed) != bool(attempts):
        return f"malformed {ours.malformed} {attempts}"
    reasoning = (ours.message.get("reasoning_content") or "").strip()
    if reasoning != (theirs.reasoning_content or "").strip():
        return f"reasoning {reasoning!r} {theirs.reasoning_content!r}"
    content = (ours.message["content"] or "").strip()
    if not ours.malformed and content != theirs.content.strip():
        return f"content {content!r} {theirs.content!r}"
    return None


@pytest.mark.parametrize("family", SECOND)
def test_renderers_says_the_same(folder: Path, family: str) -> None:
    both = Both(folder, family)
    differing = []
    for seed in range(300):
        case = corpus(family, seed)
        said = difference(both, case)
        if said:
            differing.append(f"{seed} {case}: {said}")
    assert not differing, f"{len(differing)}\n" + "\n".join(differing[:12])


class Said(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    malformed: int = 0


class Difference(NamedTuple):
    family: str
    why: str
    text: str
    ours: Said
    theirs: Said
    starts_in_reasoning: bool = False


def differences() -> Iterator[Difference]:
    """Where we differ on purpose."""
    hermes = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    clock = [("clock", {})]
    yield Difference(
        "hermes",
        "reasoning goes to its close or to the end: a call drafted in it is not made",
        f"Hm. {hermes}",
        Said(f"Hm. {hermes}", "", []),
        Said("Hm.", "", clock),
        starts_in_reasoning=True,
    )
    yield Difference(
        "hermes",
        "text after a call was sampled and is shown",
        f"{hermes}\nDone.",
        Said("", "\nDone.", clock),
        Said("", "", clock),
    )
    broken = '<tool_call>{"name": }</tool_call>'
    yield Difference(
        "hermes",
        "a call that cannot be read goes back as text",
        f"I look. {broken}",
        Said("", f"I look. {broken}", [], 1),
        Said("", "I look.", [], 1),
    )
    listed = '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>'
    yield Difference(
        "hermes",
        "arguments are an object",
        listed,
        Said("", listed, [], 1),
        Said("", "", [("clock", [1])]),
    )
    yield Difference(
        "hermes",
        "only the newlines that the template writes are hidden",
        "  I look. \n",
        Said("", "  I look. \n", []),
        Said("", "I look.", []),
    )
    yield Difference(
        "qwen3_coder",
        "the models often forget the outer marker",
        "<function=clock>\n</function>",
        Said("", "", clock),
        Said("", "<function=clock>\n</function>", []),
    )
    junk = "<tool_call>\n<function=clock>\nnow\n</function>\n</tool_call>"
    yield Difference(
        "qwen3_coder",
        "text between the parameters would be lost",
        junk,
        Said("", junk, [], 1),
        Said("", "", clock),
    )
    yield Difference(
        "glm",
        "a string keeps its white space",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value> a\n</arg_value>\n</tool_call>",
        Said("", "", [("get_weather", {"city": " a\n"})]),
        Said("", "", [("get_weather", {"city": "a"})]),
    )
    yield Difference(
        "glm",
        "the environment answers a call of a tool it does not have",
        "<tool_call>nothing</tool_call>",
        Said("", "", [("nothing", {})]),
        Said("", "", [], 1),
    )
    yield Difference(
        "glm",
        "the environment answers a value of the wrong type",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>two</arg_value>\n</tool_call>",
        Said("", "", [("get_weather", {"days": "two"})]),
        Said("", "", [], 1),
    )
    yield Difference(
        "minimax",
        "a complete call counts, though its section is cut off",
        '<minimax:tool_call>\n<invoke name="clock">\n</invoke>\n',
        Said("", "", clock),
        Said("", "", [], 1),
    )
    yield Difference(
        "kimi",
        "a complete call counts without a section",
        "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        Said("", "", clock),
        Said("", "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}<|tool_call_end|>", []),
    )
    yield Difference(
        "llama3_json",
        "several calls, as vLLM",
        '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}',
        Said("", "", clock * 2),
        Said("", '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}', []),
    )
    yield Difference(
        "llama3_json",
        "an object with a name is an answer, unless it has parameters",
        '{"name": "Ada", "age": 36}',
        Said("", '{"name": "Ada", "age": 36}', []),
        Said("", "", [("Ada", {})]),
    )
    yield Difference(
        "harmony",
        "text without a header is shown",
        "Hello.",
        Said("", "Hello.", []),
        Said("", "", []),
    )


@pytest.mark.parametrize("difference", list(differences()), ids=lambda difference: difference.why)
def test_renderers_says_something_else(folder: Path, difference: Difference) -> None:
    both = Both(folder, difference.family)
    case = Case(difference.text, difference.starts_in_reasoning)
    parsed = both.ours.parse_answer(both.ours.encode(case.text), helpers.TOOLS, case.starts_in_reasoning)
    message = parsed.message
    ours = Said(
        message.get("reasoning_content") or "",
        message["content"] or "",
        helpers.calls_of(message),
        len(parsed.malformed),
    )
    assert ours == difference.ours
    theirs = both.theirs(case)
    ok = [(call.name, call.arguments) for call in theirs.tool_calls if call.status == ToolCallParseStatus.OK]
    attempts = len(theirs.tool_calls) - len(ok)
    assert Said(theirs.reasoning_content or "", theirs.content, ok, attempts) == difference.theirs


def damaged(case: Case, random_: random.Random) -> Case:
    """The answer cut off, or with another letter somewhere."""
    at = random_.randint(0, len(case.text))
    if random_.random() < 0.5:
        return case._replace(text=case.text[:at])
    return case._replace(text=case.text[:at] + random_.choice(["", '"', "}", "\n"]) + case.text[at + 1 :])


@pytest.mark.parametrize("family", SECOND)
def test_no_call_that_renderers_reads_is_lost_in_silence(folder: Path, family: str) -> None:
    both = Both(folder, family)
    for seed in range(300):
        case = damaged(corpus(family, seed), random.Random(seed))
        ours = both.ours.parse_answer(both.ours.encode(case.text), helpers.TOOLS, case.starts_in_reasoning)
        assert "".join(text for _, text, _, _ in ours.segments) == case.text
        read = [call for call in both.theirs(case).tool_calls if call.status == ToolCallParseStatus.OK]
        drafted = [
            call for call in read if any(k == "reasoning" and call.raw in text for k, text, _, _ in ours.segments)
        ]
        # Llama's calls have no marker: an object without parameters is an answer.
        plain = [call for call in read if family == "llama3_json" and '"parameters"' not in case.text]
        found = len(helpers.calls_of(ours.message)) + len(ours.malformed)
        assert len(read) <= found + len(drafted) + len(plain), case
