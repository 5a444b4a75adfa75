"""Answers to messages: the choice of parsers, and the round trip through templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import render_helpers as helpers
from primerl.render import Renderer, RenderError

HISTORY = [{"role": "user", "content": "Why?"}]

# (tool parser, reasoning parser) by the beginning of the template's name; the longest beginning counts.
CHOICES = {
    "": ("none", "none"),
    "deepseek": ("deepseek", "think"),
    "diffusion_gemma": ("gemma4", "gemma4"),
    "gemma4": ("gemma4", "gemma4"),
    "glm4moe": ("glm", "think"),
    "gptoss": ("harmony", "harmony"),
    "lfm2_v2": ("llama3_pythonic", "none"),
    "lfm2_2_5": ("llama3_pythonic", "think"),
    "llama3_1": ("llama3_json", "none"),
    "llama3_2": ("llama3_json", "none"),
    "nemotron_3": ("qwen3_coder", "think"),
    "qwen2_5": ("hermes", "none"),
    "qwen2_5_vl": ("none", "none"),
    "qwen3": ("hermes", "think"),
    "qwen3_5": ("qwen3_coder", "think"),
    "qwen3_6": ("qwen3_coder", "think"),
    "qwen3_8": ("qwen3_coder", "think"),
    "qwen3_instruct_2507": ("hermes", "none"),
    "qwen3_vl": ("hermes", "none"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def expected_choice(template: str) -> tuple[str, str]:
    return CHOICES[max((name for name in CHOICES if template.startswith(name)), key=len)]


@pytest.mark.parametrize("name", helpers.trl_template_names())
def test_the_parsers_follow_from_the_template(folder: Path, name: str) -> None:
    renderer = Renderer(helpers.write_family(folder / name, helpers.trl_template(name)))
    assert (renderer.tool_parser, renderer.reasoning_parser) == expected_choice(name)


def test_the_model_type_decides_where_the_template_writes_no_calls(folder: Path) -> None:
    model = helpers.write_tiny_model(folder / "kimi")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}), encoding="utf-8")
    assert Renderer(model).tool_parser == "kimi"
    assert Renderer(model, tool_parser="glm", reasoning_parser="think").tool_parser == "glm"
    with pytest.raises(RenderError, match=r"no tool parser \"glm5\"; there are hermes, "):
        Renderer(model, tool_parser="glm5")


def answers() -> list[helpers.Message]:
    """Assistant messages with every combination of parts."""
    calls = [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for arguments in ({"city": "Zürich", "days": 2}, {"city": 'a "b" \\ <c>\nd', "limit": 0.5}, {})
    ]
    return [
        {
            "role": "assistant",
            "content": content,
            **({"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}),
            **({"tool_calls": chosen} if chosen else {}),
        }
        for reasoning in (None, "Hm.\n\nSo é.")
        for content in ("", "I look.", "a < b & c\n\n  [d](e) {f}")
        for chosen in ([], calls[:1], calls[1:2], calls[2:], calls[:2])
    ]


def sampled_ids(renderer: Renderer, answer: str) -> list[int]:
    """Ids up to the stop token; what a template writes after it is not sampled."""
    ids = renderer.encode(answer)
    last = max((at for at, token in enumerate(ids) if token in renderer.stop_token_ids), default=len(ids) - 1)
    return ids if renderer.decode(ids[last + 1 :]).strip() else ids[: last + 1]


def prompt_of(renderer: Renderer, full: str) -> str | None:
    """The generation prompt that the answered conversation goes on from."""
    prompt = renderer.render_text(HISTORY, helpers.TOOLS, True)
    without_thinking = renderer.render_text(HISTORY, helpers.TOOLS, True, {"enable_thinking": False})
    # DeepSeek's prompt opens reasoning that its template does not write back.
    candidates = [prompt, without_thinking, prompt.removesuffix("<think>\n")]
    return next((prompt for prompt in candidates if full.startswith(prompt)), None)


def round_trip(renderer: Renderer, answer: helpers.Message) -> bool:
    """Whether the template takes the answer after its own prompt; asserts that it writes the parsed answer alike."""
    tools = helpers.TOOLS
    # DeepSeek's templates tell calls by null content; to GLM's that is the text "None".
    nothing = None if renderer.tool_parser == "deepseek" and "tool_calls" in answer else ""
    answer = {**answer, "content": answer["content"] or nothing}
    try:
        full = renderer.render_text([*HISTORY, answer], tools, False)
    except RenderError:
        return False
    prompt = prompt_of(renderer, full)
    if prompt is None:
        return False
    ids = sampled_ids(renderer, full[len(prompt) :])
    parsed = renderer.parse_answer(ids, tools, renderer.starts_in_reasoning(renderer.encode(prompt)))
    message = parsed.message
    assert parsed.malformed == []
    if "tool_calls" in answer and "get_weather" not in parsed.text:
        return False  # R1's template drops calls beside content.
    assert "".join(text for _, text, _, _ in parsed.segments) == parsed.text
    # The template of gpt-oss writes the first call only.
    assert helpers.calls_of(message) == helpers.calls_of(answer)[: 1 if renderer.tool_parser == "harmony" else None]
    # Some templates leave reasoning out. Llama's leaves content beside calls out, gpt-oss's writes it as reasoning.
    reasoning = message.get("reasoning_content")
    if renderer.tool_parser not in ("harmony", "llama3_json"):
        assert message["content"] == (answer["content"] or (None if "tool_calls" in answer else ""))
        assert reasoning == (answer.get("reasoning_content") if "So é." in parsed.text else None)
    again = {**message, "content": message["content"] or nothing, **({"thinking": reasoning} if reasoning else {})}
    if "tool_plan" in answer:
        again["tool_plan"] = reasoning or ""
    assert renderer.render_text([*HISTORY, again], tools, False) == full
    return True


# How many answers with calls, of 24, a template takes, where it does not take all.
ROUND_TRIPS = {
    "deepseek_r1": 8,  # drops calls beside content
    "gptoss": 16,  # refuses content and reasoning beside a call
    "llama3": 18,  # one call at a time
    "qwen3_5_nothink": 12,  # its prompt closes the reasoning
}


NEW = {name: text for name, text in helpers.more_templates().items() if "DSML" in text or "message.tool_plan" in text}


@pytest.mark.parametrize("name", sorted(NEW))
def test_a_parsed_answer_of_a_family_that_trl_has_not(folder: Path, name: str) -> None:
    renderer = Renderer(helpers.write_family(folder / name.replace("/", "_"), NEW[name]))
    assert renderer.tool_parser in ("deepseek_v32", "cohere")
    # Cohere's templates write reasoning under another name, and no content beside calls.
    calls = [answer for answer in answers() if "tool_calls" in answer]
    done = [
        round_trip(renderer, {**answer, "tool_plan": answer.get("reasoning_content") or ""})
        for answer in calls
        if renderer.tool_parser != "cohere" or not answer["content"]
    ]
    if not any(done):
        pytest.skip("its prompt opens the response: it writes calls beside documents only")
    assert sum(done) >= 4


@pytest.mark.parametrize("name", [name for name in helpers.trl_template_names() if expected_choice(name)[0] != "none"])
def test_a_parsed_answer_is_rendered_as_it_was_sampled(folder: Path, name: str) -> None:
    renderer = Renderer(helpers.write_family(folder / name, helpers.trl_template(name)))
    done = [round_trip(renderer, answer) for answer in answers() if "tool_calls" in answer]
    least = next((number for start, number in ROUND_TRIPS.items() if name.startswith(start)), len(done))
    assert sum(done) == least
