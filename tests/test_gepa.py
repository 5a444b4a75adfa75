"""`primerl gepa`: a search over prompts with an endpoint, killed and resumed, whose prompt `primerl eval` uses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from end_to_end import read_lines, until
from eval_endpoint import KEY, Endpoint, of_endpoint, run_with_key, serving
from primerl.cli.gepa import configured, written_out
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.gepa import GepaConfig
from primerl.envs.generations import v1
from primerl.envs.overrides import Overrides, reserved, split
from primerl.gepa import search

TASK = {"split": "eval", "num_examples": 12, "letters": "a-j", "min_length": 3, "max_length": 6}
START, BEST = "You help.", "Put it between <r> and </r>."


class Model(Endpoint):
    """Reverses, but puts tags around it only where the system prompt names them; `teacher` proposes such a prompt."""

    def respond(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        if handler.command == "GET":
            return super().respond(handler)
        assert handler.headers.get("Authorization") == f"Bearer {KEY}"
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        messages = body["messages"]
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        question = messages[-1]["content"]
        self.asked.append(question if body["model"] == "teacher" else f"{system}|{question}")
        if len(self.asked) > self.answers:
            self.open.wait(120)
        if body["model"] == "teacher":
            text = f"```\n{BEST if len(question) % 2 else BEST + ' Only that.'}\n```"
        else:
            reversed_text = question.removeprefix("Reverse: ")[::-1]
            text = f"<r>{reversed_text}</r>" if "<r>" in system else reversed_text
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        return 200, {"id": "1", "object": "chat.completion", "model": "served", "choices": [choice], "usage": usage}


def command(served: Endpoint, output: Path, *more: str) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "primerl",
        "gepa",
        "run",
        "--env",
        json.dumps([{"id": "reverse-text", "taskset": TASK}]),
    ]
    words += [*of_endpoint(served), "-M", "teacher", "-B", "16", "-n", "8", "-N", "4", "--initial-prompt", START]
    return [*words, "--perfect-score", "1.0", "-o", str(output), *more]


def left(output: Path) -> dict[str, Any]:
    found = {name: read_lines(output / name) for name in ("results.jsonl", "pareto_frontier.jsonl")}
    return {**found, "prompt": (output / "system_prompt.txt").read_text(encoding="utf-8")}


@pytest.mark.processes
def test_a_search_improves_resumes_after_kill_9_and_its_prompt_is_used(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with serving(Model()) as served:
        done = run_with_key(command(served, whole))
        assert done.returncode == 0, done.stdout + done.stderr
        asked = sorted(served.asked)
    found = left(whole)
    assert found["prompt"].startswith(BEST)
    start, *_, best = found["results.jsonl"]
    assert (start["reward"], best["reward"]) == (0.0, 1.0)
    assert json.loads((whole / "metadata.json").read_text(encoding="utf-8"))["best_score"] == 1.0
    with serving(Model(answers=4)) as served:
        variables = {**os.environ, "PRIMERL_TEST_KEY": KEY}
        running = subprocess.Popen(
            command(served, killed), env=variables, stdout=subprocess.DEVNULL, start_new_session=True
        )
        until(lambda: len(served.asked) > 4, 60, "the second evaluation to ask")
        running.send_signal(signal.SIGKILL)
        running.wait()
        before = served.asked[:4]
        served.answers = 1 << 30
        served.asked.clear()
        other = run_with_key(command(served, killed, "--temperature", "0.5"))
        assert other.returncode == 2
        assert "temperature is 0.5, but the search in" in " ".join((other.stdout + other.stderr).split())
        done = run_with_key(command(served, killed))
        assert done.returncode == 0, done.stdout + done.stderr
        assert left(killed) == found
        assert sorted([*before, *served.asked]) == asked
        served.asked.clear()
        entry = {"id": "reverse-text", "taskset": TASK, "system_prompt_file": str(killed / "system_prompt.txt")}
        words = [sys.executable, "-m", "primerl", "eval", "--env", json.dumps([entry]), *of_endpoint(served)]
        done = run_with_key([*words, "--output-dir", str(tmp_path / "eval")])
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(question.startswith(found["prompt"]) for question in served.asked)
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text(encoding="utf-8"))
    assert summary["environments"]["reverse-text"]["scores"]["avg@1"] == 1.0


def test_published_flags_stand_for_keys() -> None:
    given = ["run", "a", "-m", "x", "-M", "y", "-B", "50", "-n", "8", "-N", "4", "--minibatch-size", "2"]
    given += ["--state-columns", "exact", "turns", "--perfect-score", "1.0", "-b", "http://e:1/v1"]
    config = load(GepaConfig, written_out(given), program="primerl gepa")
    assert (config.env[0].id, config.gepa.max_calls, config.gepa.minibatch_size) == ("a", 50, 2)
    assert config.gepa.state_columns == ["exact", "turns"]
    assert config.teacher().model == "y"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"base_url": None}, "reflection_base_url is unset"),
        ({"reflection_base_url": "http://t:1/v1"}, "needs a reflection_model"),
        (
            {"env": [{"id": "a", "num_examples": 3}]},
            "are chosen by gepa.num_train",
        ),
        ({"env": [{"id": "a", "system_prompt": "x", "system_prompt_file": "y"}]}, "both given"),
        ({"env": [{"id": "a", "system_prompt_file": "/nowhere/x.txt"}]}, "cannot be read: No such file"),
        ({"env": [{"id": "a", "args": {"primerl": 1}}]}, "keeps for itself"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        GepaConfig.model_validate({"model": "m", "base_url": "http://e:1/v1", "env": [{"id": "a"}], **values})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, ("base_url", "api_key_env")),
        ({"reflection_model": "t"}, ("base_url", "api_key_env")),
        ({"reflection_model": "t", "reflection_api_key_env": "T"}, ("base_url", "reflection_api_key_env")),
        (
            {"reflection_model": "t", "reflection_base_url": "http://t:1/v1"},
            ("reflection_base_url", "reflection_api_key_env"),
        ),
    ],
)
def test_an_endpoint_of_reflections_is_told_by_its_own_keys(given: dict[str, str], named: tuple[str, str]) -> None:
    values = {"model": "m", "base_url": "http://e:1/v1", "env": [{"id": "a"}], **given}
    keys = GepaConfig.model_validate(values).teachers_keys()
    assert (keys["base_url"], keys["api_key_env"]) == named
    assert keys["model"] == ("reflection_model" if "reflection_model" in given else "model")


def test_a_budget_below_one_round_is_refused() -> None:
    config = GepaConfig.model_validate(
        {"model": "m", "base_url": "http://e:1/v1", "env": [{"id": "a"}], "gepa": {"max_calls": 9, "num_val": 4}}
    )
    with pytest.raises(ConfigError, match=r"max_calls \(9\) is below one round, 10"):
        search.sizes(config, 200, lambda _: None)


def test_examples_are_chosen_by_their_places() -> None:
    own, asked = split({"x": 1, **reserved(None, [2, 0])})
    assert own == {"x": 1}
    assert list(asked.applied(v1, "a", ["p", "q", "r"])) == ["r", "p"]
    with pytest.raises(Exception, match="has 1 examples, and example_places names 2"):
        asked.applied(v1, "a", ["p"])
    assert Overrides().applied(v1, "a", ["p"]) == ["p"]


def test_names_of_endpoints_stand_for_servers(tmp_path: Path) -> None:
    entry = '[[endpoint]]\nendpoint_id = "{0}"\nmodel = "own-{0}"\nurl = "http://{0}:1/v1"\nkey = "KEY_{1}"\n'
    (tmp_path / "servers.toml").write_text(entry.format("a", "A") + entry.format("b", "B"), encoding="utf-8")
    tree = 'model = "a"\nreflection_model = "b"\nendpoints_path = "servers.toml"\n[[env]]\nenv_id = "reverse-text"\n'
    (tmp_path / "gepa.toml").write_text(f"{tree}[gepa]\nnum_val = 4\n[sampling]\nmax_tokens = 64\n", encoding="utf-8")
    config, _ = configured(["run", str(tmp_path / "gepa.toml"), "-B", "50"])
    assert (config.model, config.base_url, config.api_key_env) == ("own-a", "http://a:1/v1", "KEY_A")
    teacher = config.teacher()
    assert (teacher.model, teacher.base_urls, teacher.api_key_env) == ("own-b", ["http://b:1/v1"], "KEY_B")
    assert (config.env[0].id, config.gepa.max_calls, config.gepa.num_val) == ("reverse-text", 50, 4)
    assert (config.max_tokens, config.temperature) == (64, 1.0)
    given = ["-m", "a", "-e", str(tmp_path / "servers.toml"), "-a", '{"x": 1}', "-S", '{"max_tokens": 9}']
    config, _ = configured(["run", "reverse-text", *given])
    assert (config.teacher().model, config.env[0].args, config.max_tokens) == ("own-a", {"x": 1}, 9)
    with pytest.raises(ConfigError, match="there is no environment to give it to"):
        configured(["run", *given])


def test_a_search_is_not_resumed_with_another_environment(tmp_path: Path) -> None:
    def of(**values: Any) -> GepaConfig:
        return GepaConfig.model_validate({"model": "m", "base_url": "http://e:1/v1", "env": [{"id": "a"}], **values})

    (tmp_path / search.BEGUN).write_text(json.dumps(search._values(of())), encoding="utf-8")
    search.same_search(of(gepa={"max_calls": 900, "max_concurrent": 2}, api_key_env="OTHER"), tmp_path)
    with pytest.raises(ConfigError, match=r"env\.id is 'b', but the search in .* was begun with 'a'"):
        search.same_search(of(env=[{"id": "b"}]), tmp_path)
    with pytest.raises(ConfigError, match=r"gepa\.seed is 1"):
        search.same_search(of(gepa={"seed": 1}), tmp_path)
