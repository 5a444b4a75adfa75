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


def answer_with(calls: int, content: str | None = 'Yes, "it" does.') -> helpers.Message:
    answer: helpers.Message = {"role": "assistant", "content": content}
    return answer | {"tool_calls": [call(index) for index in range(calls)]} if calls else answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def extends(
    renderer: Renderer, calls: int, new: list[helpers.Message], content: str | None = "Yes.", least: int = 5
) -> bool:
    """Whether the renderer claims the extension; asserts that the claim is right after every history."""
    tools = helpers.TOOLS if calls else None
    answer = answer_with(calls, content)
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
    # Some further templates refuse every call of these histories.
    assert compared >= least
    return True


def test_the_demo_model_extends_by_users(folder: Path) -> None:
    renderer = Renderer(helpers.write_tiny_model(folder / "tiny"))
    prompt = renderer.render([{"role": "user", "content": "x"}])
    sampled = renderer.encode("<r>x</r><|im_end|>")
    suffix = renderer.extend({"role": "assistant", "content": "<r>x</r>"}, sampled, [{"role": "user", "content": "y"}])
    whole = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<r>x</r>"}]
    assert prompt + sampled + suffix == renderer.render([*whole, {"role": "user", "content": "y"}])


# What each template is known to allow (its `_training` variant the same): a change here changes what a run renders
# again. The words are those of the scenarios; "quiet" where the answer's calls have no text beside them.
USERS = {"user", "two users"}
TOOLS = {"tool", "two tools", "tool, user"}
QUIET = {f"{kind}, quiet" for kind in TOOLS}
ALLOWED: list[tuple[set[str], str]] = [
    (
        USERS | TOOLS | QUIET,
        "gemma4_v2 glm4moe lfm2_2_5_vl lfm2_v2 muse_glimmer nemotron_3_5_lightning nemotron_3_nano "
        "nemotron_3_super nemotron_3_ultra qwen2_5 qwen3 qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 "
        "qwen3_instruct_2507 ",
    ),
    (USERS, "deepseek_r1_distill deepseekv3 lfm2 llama3 phi3 phi3_5 qwen2_5_vl "),
    (USERS | TOOLS | {"tool, user, quiet"}, "diffusion_gemma gemma4 gemma4_v3 gemma4_v4 gemma4_v5 "),
    ({"user"}, "cohere cohere2 gemma gemma3 "),
    (set(), "idefics3 llava_next smolvlm "),
    (USERS | TOOLS, "lfm2_2_5 lfm2_2_5_v2 qwen3_vl "),
    (USERS | {"tool", "tool, quiet", "tool, user", "tool, user, quiet"}, "llama3_1 llama3_2 "),
    ({"tool", "tool, user"}, "gptoss "),
]
KNOWN = {name: allowed for allowed, names in ALLOWED for name in names.split()}
# Stop tokens of the families whose template does not show them (their generation_config.json names them).
STOP = {
    "gptoss": ["<|return|>", "<|call|>", "<|endoftext|>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
}


def extending(renderer: Renderer, least: int = 5) -> set[str]:
    """Scenarios that extend; those with calls once with text beside the calls, once with null ("quiet")."""
    found = set()
    for kind, (calls, new) in SCENARIOS.items():
        if extends(renderer, calls, new, least=least):
            found.add(kind)
        if calls and extends(renderer, calls, new, None, least):
            found.add(f"{kind}, quiet")
    return found


@pytest.mark.parametrize("name", helpers.trl_template_names())
def test_templates_extend_where_known_and_never_wrongly(name: str, folder: Path) -> None:
    family = name.removesuffix("_training")
    path = helpers.write_family(folder / name, helpers.trl_template(name), STOP.get(family, ()))
    assert extending(Renderer(path)) == KNOWN[family]


@pytest.mark.parametrize("name", sorted(helpers.more_templates()))
def test_no_further_template_extends_wrongly(name: str, folder: Path) -> None:
    extending(Renderer(helpers.write_family(folder / name, helpers.more_templates()[name])), least=0)


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
