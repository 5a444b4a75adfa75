"""What Hosted Training documents for v1 environments: harness settings, rewards and toolsets from the config."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import primerl
import pytest
from primerl.envs.generations import v1
from test_env_adapter import ENVIRONMENTS, ROOT, Gateway, chat_completion, roll_out

TOOLSET = {
    "tools": ["bound_functions:search", "bound_functions:shout"],
    "objects": {"index": "bound_functions:load_index"},
    "bindings": {"search.index": "objects.index", "search.missing": "not there"},
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions, for this process and for the tool server that it starts."""
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ENVIRONMENTS), str(Path(primerl.__file__).parent.parent)]))


def calling(*calls: tuple[str, dict[str, Any]]) -> Gateway:
    """A model that calls these tools, one a turn, and then answers."""
    left = list(calls)

    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        if not left:
            return 200, chat_completion("done")
        name, arguments = left.pop(0)
        call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
        return 200, chat_completion("", choices=choices)

    return Gateway(answer)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")
def test_functions_of_the_config_are_tools_and_rewards() -> None:
    gateway = calling(("search", {"query": "abc"}), ("search", {"query": "xyz"}), ("shout", {"text": "a"}))
    taskset = {"toolsets": {"words": TOOLSET}, "rewards": [{"fn": "bound_functions:found", "weight": 0.5}]}
    outcome = roll_out("reverse-text", gateway, {"taskset": {"num_examples": 1, **taskset}})
    assert outcome["ok"], outcome["error"]
    first, *_, last = [request for _, _, request in gateway.calls]
    tools = {tool["function"]["name"]: tool["function"] for tool in first["tools"]}
    assert set(tools) == {"search", "shout"}
    assert tools["search"]["description"] == "Look a word up."
    assert set(tools["search"]["parameters"]["properties"]) == {"query"}, "what is bound is not asked for"
    said = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    assert ["the first letters" in said[0], "not there" in said[1], "A" in said[2]] == [True, True, True]
    [trace] = outcome["traces"]
    # "done" is no reversed text in tags: all of the reward is the config's.
    assert trace["reward"] == 0.5


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")
def test_harness_settings_are_the_seats() -> None:
    gateway = calling(*[("shout", {"text": "a"})] * 9)
    arguments = {"taskset": {"num_examples": 1, "toolsets": {"words": TOOLSET}}, "harness": {"max_turns": 2}}
    outcome = roll_out("reverse-text", gateway, {**arguments, "agent": {"max_input_tokens": 10_000}})
    assert len(gateway.calls) == 2
    assert outcome["traces"][0]["stop_condition"] == "max_turns"


def loaded(taskset: dict[str, Any] | None = None, **arguments: Any) -> Any:
    v1.prepare()
    return v1.load("reverse-text", {"taskset": {"num_examples": 1, **(taskset or {})}, **arguments}, ROOT)


def test_harness_settings_without_an_id_keep_the_harness() -> None:
    env = loaded(harness={"tool_timeout": 5.0, "max_turns": 3})
    assert (env.config.agent.harness.id, env.config.agent.harness.tool_timeout) == ("primerl-chat", 5.0)
    assert env.config.agent.max_turns == 3


@pytest.mark.parametrize(
    ("taskset", "arguments", "mend"),
    [
        ({}, {"harness": {"max_turns": 2}, "agent": {"max_turns": 3}}, "omit one of them"),
        ({}, {"harness": "chat"}, "`harness` must be a table"),
        ({}, {"harness": {"no_such": 1}}, "no_such"),
        ({"rewards": [{"weight": 1}]}, {}, "each with the function `fn`"),
        ({"rewards": [{"fn": "a:found"}, {"fn": "b:found"}]}, {}, "two functions are called 'found'"),
        ({"toolsets": {"w": {**TOOLSET, "tools": ["no_such_module:search"]}}}, {}, "No module named 'no_such_module'"),
        ({"toolsets": {"w": {"tools": ["bound_functions:none"]}}}, {}, "'bound_functions:none' is no function"),
        ({"toolsets": {"w": {**TOOLSET, "bindings": {"search.no": 1}}}}, {}, "'search.no' is no argument of a tool"),
        ({"toolsets": {"w": {**TOOLSET, "bindings": {"search.index": "objects.no"}}}}, {}, "there is no 'objects.no'"),
        ({"toolsets": {"v": TOOLSET, "w": TOOLSET}}, {}, "two tools are called 'search'"),
        ({"toolsets": {"w": {**TOOLSET, "objects": {"index": "json:none"}}}}, {}, "'json:none' is no function"),
        ({"toolsets": {"w": {**TOOLSET, "objects": {"index": "no_mod:x"}}}}, {}, "No module named 'no_mod'"),
        (
            {"rewards": [{"fn": "bound_functions:found"}, {"fn": "no_mod:fn"}]},
            {},
            "taskset.rewards[1].fn: 'no_mod:fn' cannot be imported: ModuleNotFoundError: No module named 'no_mod'",
        ),
        ({"rewards": [{"fn": "json:none"}]}, {}, "taskset.rewards[0].fn: 'json:none' cannot be imported: TypeError"),
        ({"rewards": [{"fn": "gone.py:fn"}]}, {}, "'gone.py:fn' cannot be imported: FileNotFoundError"),
        ({"rewards": [{"fn": "fails_to_import:fn"}]}, {}, "taskset.rewards[0].fn: 'fails_to_import:fn' cannot be"),
        ({"task": {"stops": {"early": {"fn": "json:none"}}}}, {}, "taskset.task.stops.early.fn: 'json:none' cannot"),
    ],
)
def test_what_cannot_be_used_is_refused(
    taskset: dict[str, Any],
    arguments: dict[str, Any],
    mend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "fails_to_import.py").write_text("raise OSError('no such device')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(v1.EnvironmentRefusedError) as caught:
        loaded(taskset, **arguments)
    assert "reverse-text" in str(caught.value)
    assert mend in str(caught.value)


def test_objects_are_made_by_the_tool_server_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked before a start is imported, and not called."""
    (tmp_path / "costly.py").write_text("def load():\n    raise AssertionError('called')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded({"toolsets": {"w": {**TOOLSET, "objects": {"index": "costly:load"}}}}).taskset is not None


def test_a_reward_in_a_file_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("async def exact(task, trace):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    env = loaded({"rewards": [{"fn": "mine.py:exact", "weight": 2.0}]})
    assert env.config.taskset.task.rewards["exact"].weight == 2.0
