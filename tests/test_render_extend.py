"""Extension of recorded turns, against full renders and against hand-written bridges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
from primerl.render import Renderer, RenderError
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer

USER = {"role": "user", "content": "And\n\nthen? é"}


def call(index: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": "Zürich"}}
    return {"id": f"call0000{index}", "type": "function", "function": function}


def result(index: int) -> helpers.Message:
    return {"role": "tool", "tool_call_id": f"call0000{index}", "name": "get_weather", "content": f"{index} mm\n"}


# Tool calls of the answer, and what comes after it.
SCENARIOS: dict[str, tuple[int, list[helpers.Message]]] = {
    "user": (0, [USER]),
    "two users": (0, [USER, USER]),
    "tool": (1, [result(0)]),
    "two tools": (2, [result(0), result(1)]),
    "tool, user": (1, [result(0), USER]),
}


def answer_with(calls: int, content: str = 'Yes, "it" does.') -> helpers.Message:
    answer: helpers.Message = {"role": "assistant", "content": content}
    return answer | {"tool_calls": [call(index) for index in range(calls)]} if calls else answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def extends(renderer: Renderer, calls: int, new: list[helpers.Message]) -> bool:
    """Whether the renderer claims the extension; asserts that the claim is right after every history."""
    tools = helpers.TOOLS if calls else None
    answer = answer_with(calls)
    sampled = renderer.encode("anything")
    try:
        suffix = renderer.extend(answer, sampled, new, tools)
    except RenderError:
        return False
    assert suffix[0] in renderer.stop_token_ids
    # A turn that was closed by sampling is not closed twice.
    assert renderer.extend(answer, [*sampled, suffix[0]], new, tools) == suffix[1:]
    compared = 0
    for seed in range(30):
        history = helpers.conversation(seed, system=seed % 2 == 0, tools=calls > 0, reasoning=False)
        while history and history[-1]["role"] == "assistant":
            history.pop()
        try:
            full = renderer.render([*history, answer, *new], tools)
        except RenderError:
            continue
        assert full[-len(suffix) :] == suffix
        compared += 1
    assert compared >= 5
    return True


def test_the_demo_model_extends_by_users(folder: Path) -> None:
    renderer = Renderer(helpers.write_tiny_model(folder / "tiny"))
    prompt = renderer.render([{"role": "user", "content": "x"}])
    sampled = renderer.encode("<r>x</r><|im_end|>")
    suffix = renderer.extend({"role": "assistant", "content": "<r>x</r>"}, sampled, [{"role": "user", "content": "y"}])
    whole = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<r>x</r>"}]
    assert prompt + sampled + suffix == renderer.render([*whole, {"role": "user", "content": "y"}])


# What each template is known to allow: a change here changes what a run has to render again.
KNOWN = {
    "qwen3": set(SCENARIOS),
    "qwen3_instruct_2507": set(SCENARIOS),
    "qwen2_5": set(SCENARIOS),
    "qwen3_5_think": set(SCENARIOS),
    "nemotron_3_nano": set(SCENARIOS),
    "llama3": {"user", "two users"},
}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_templates_extend(name: str, folder: Path) -> None:
    template = helpers.trl_template(name)
    write = helpers.write_llama if name.startswith("llama") else helpers.write_qwen
    renderer = Renderer(write(folder / name, template))
    assert {kind for kind, (calls, new) in SCENARIOS.items() if extends(renderer, calls, new)} == KNOWN[name]


@pytest.mark.parametrize("name", helpers.trl_template_names())
def test_no_template_extends_wrongly(name: str, folder: Path) -> None:
    renderer = Renderer(helpers.write_family(folder / f"family_{name}", helpers.trl_template(name)))
    for calls, new in SCENARIOS.values():
        extends(renderer, calls, new)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("kind", sorted(SCENARIOS))
def test_qwen3_extends_like_its_hand_written_bridge(kind: str, closed: bool, folder: Path) -> None:
    path = helpers.write_qwen(folder / f"bridge_{kind}_{closed}".replace(", ", "_"), helpers.trl_template("qwen3"))
    # Both keep the thinking that was sampled.
    config = Qwen3RendererConfig(thinking_retention="all")
    ours, bridge = Renderer(path), Qwen3Renderer(AutoTokenizer.from_pretrained(path), config)
    calls, new = SCENARIOS[kind]
    tools = helpers.TOOLS if calls else None
    answer = answer_with(calls)
    prompt = ours.render([USER], tools)
    sampled = ours.encode("<think>\nHm.\n</think>\n\nYes" + ("<|im_end|>" if closed else ""))
    bridged = bridge.bridge_to_next_turn(prompt, sampled, new, tools=tools)
    assert bridged is not None
    assert prompt + sampled + ours.extend(answer, sampled, new, tools) == list(bridged.token_ids)


def test_template_arguments_reach_the_suffix(folder: Path) -> None:
    renderer = Renderer(helpers.write_qwen(folder / "thinking", helpers.trl_template("qwen3")))
    suffix = renderer.extend(answer_with(0), [], [USER], None, {"enable_thinking": False})
    assert renderer.decode(suffix).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
