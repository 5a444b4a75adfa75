"""`primerl gepa` with a checkpoint: the model is served here, by one engine for the whole search."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from end_to_end import find, measured, read_lines, until
from eval_endpoint import KEY, Endpoint, run_with_key, serving
from primerl._core import inspect_run
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.gepa import GepaConfig
from primerl.gepa import search
from primerl.gepa.engines import Engines, Shared
from primerl.launch.placement.protocol import Command, Process, Role
from primerl.launch.supervise.trees import MARK, marked
from primerl.models.tiny import TinyConfig, write_model

TASK = {"split": "eval", "num_examples": 32, "letters": "a-j", "min_length": 3, "max_length": 6}
# The imitator has learnt without system prompts: letters distract it, two words do not.
START, BEST = "abcdefghij" * 4, "You help."
VAL = 24


class Teacher(Endpoint):
    """The reflection model."""

    def respond(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        assert handler.headers.get("Authorization") == f"Bearer {KEY}"
        if handler.command == "GET":
            return 200, {"data": [{"id": "teacher"}]}
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.asked.append(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": f"```\n{BEST}\n```"}
        return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def command(teacher: Endpoint, model: Path | str, output: Path, *more: str) -> list[str]:
    entry = json.dumps([{"id": "reverse-text", "taskset": TASK}])
    words = [sys.executable, "-m", "primerl", "gepa", "run", "--env", entry, "-m", str(model), "-o", str(output)]
    words += ["-M", "teacher", "--reflection-base-url", teacher.url, "--reflection-api-key-env", "PRIMERL_TEST_KEY"]
    # The budget is used up by one round: two minibatches, and the new prompt on what validates.
    words += ["-B", "50", "-n", "8", "-N", str(VAL), "-c", "1", "--max-tokens", "16", "--initial-prompt", START]
    return [*words, *more]


def left(output: Path) -> dict[str, Any]:
    return {
        "prompt": (output / "system_prompt.txt").read_text(encoding="utf-8"),
        **{name: read_lines(output / name) for name in ("results.jsonl", "pareto_frontier.jsonl")},
    }


def mark_of(config: Path) -> str:
    """The mark of the processes that were started with the one that reads this file."""
    pid = until(lambda: find(str(config)), 60, f"a process of {config}")
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(entry for entry in entries if entry.startswith(f"{MARK}=".encode())).split(b"=", 1)[1].decode()


@contextmanager
def engine_of(model: Path) -> Iterator[str]:
    """`primerl inference` by itself: its URL."""
    words = [sys.executable, "-m", "primerl", "inference", "--model.path", str(model)]
    served = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert served.stdout is not None
    try:
        with served.stdout as lines:
            yield next(line for line in lines if line.startswith("serving")).split()[-1]
    finally:
        served.terminate()
        served.wait()


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_a_checkpoint_is_searched_for_and_resumed_after_kill_9(imitator: Path, tmp_path: Path) -> None:
    output, of_endpoint = tmp_path / "checkpoint", tmp_path / "endpoint"
    evaluations = output / "evaluations"
    variables = {**os.environ, "PRIMERL_TEST_KEY": KEY}
    with serving(Teacher()) as teacher:
        running = subprocess.Popen(
            command(teacher, imitator, output), env=variables, stdout=subprocess.DEVNULL, start_new_session=True
        )
        marks = {mark_of(evaluations / "00001" / "configs" / "inference.toml")}
        # The fourth is the new prompt on what validates.
        until(lambda: measured(evaluations / "00004") >= 1, 120, "the fourth evaluation to measure")
        fourth = evaluations / "00004" / "configs" / "orchestrator.toml"
        marks.add(mark_of(fourth))
        orchestrator = find(str(fourth))
        assert orchestrator is not None

        def is_held() -> bool:
            """Whether it has measured some, and can measure no more."""
            os.kill(orchestrator, signal.SIGSTOP)
            if measured(evaluations / "00004") >= 2:
                return True
            os.kill(orchestrator, signal.SIGCONT)
            return False

        until(is_held, 120, "the fourth evaluation to measure more")
        running.send_signal(signal.SIGKILL)
        running.wait()
        assert 2 <= measured(evaluations / "00004") < VAL
        assert len(marks) == 2
        until(lambda: not any(marked(mark) for mark in marks), 30, "all processes to end")
        finished = {file: file.stat().st_mtime_ns for file in evaluations.glob("0000[123]/results.jsonl")}
        assert len(finished) == 3
        rollouts = {rollout["rollout"] for rollout in inspect_run(evaluations / "00004", "evaluated")["rollouts"]}

        done = run_with_key(command(teacher, imitator, output))
        assert done.returncode == 0, done.stdout + done.stderr
        assert find(str(evaluations / "00004" / "configs" / "inference.toml")) is None
        assert {file: file.stat().st_mtime_ns for file in finished} == finished
        assert rollouts <= {line["rollout"] for line in read_lines(evaluations / "00004" / "results.jsonl")}
        assert len(teacher.asked) == 1
        assert "<|im_end|>" not in teacher.asked[0]

        # The same model behind an endpoint answers the same, so the same prompt is found.
        with engine_of(imitator) as url:
            done = run_with_key(command(teacher, imitator.name, of_endpoint, "-b", f"{url}/v1"))
        assert done.returncode == 0, done.stdout + done.stderr
    # An engine for each of the two starts.
    log = (output / "engine" / "logs" / "inference.log").read_text(encoding="utf-8")
    assert (log.count("serving step_300 at"), log.count("weights loaded")) == (2, 5)
    found = left(output)
    assert found == left(of_endpoint)
    assert found["prompt"] == BEST
    start, best = found["results.jsonl"]
    assert start["score"] < best["score"]
    assert len(found["pareto_frontier.jsonl"]) == VAL
    summary = json.loads((output / "metadata.json").read_text(encoding="utf-8"))
    assert (summary["model"], summary["reflection_model"]) == (str(imitator), "teacher")
    assert (summary["best_score"], summary["total_metric_calls"]) == (best["score"], 2 * VAL + 6)


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GepaConfig]]:
    """The config of a search in `out`, by its model."""
    monkeypatch.setenv("PRIMERL_TEST_KEY", KEY)
    with serving(Teacher()) as teacher:

        def config(model: Path, **values: Any) -> GepaConfig:
            given: dict[str, Any] = {"model": str(model), "output_dir": str(tmp_path / "out")}
            given |= {"reflection_model": "teacher", "reflection_base_url": teacher.url}
            given |= {"reflection_api_key_env": "PRIMERL_TEST_KEY", "env": [{"id": "reverse-text", "taskset": TASK}]}
            return GepaConfig.model_validate({**given, **values})

        yield config


def refusal(config: GepaConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        search.run(config, lambda _: None)
    return str(refused.value)


def tiny(folder: Path, seed: int = 0) -> Path:
    write_model(folder, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=seed)
    return folder


def test_what_is_no_checkpoint_is_refused_and_nothing_is_written(
    wanted: Callable[..., GepaConfig], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert f"model: there is no folder {tmp_path / 'absent'}" in refusal(wanted(tmp_path / "absent"))
    assert "has no config.json; is it a model folder" in refusal(wanted(tmp_path / "empty"))
    model = tiny(tmp_path / "tiny")
    assert refusal(wanted(model, seq_len=4096)).startswith("seq_len (4096) is above what the model in")
    os.truncate(model / "model.safetensors", 1000)
    assert "is not a whole safetensors file" in refusal(wanted(model))
    assert not (tmp_path / "out").exists()


def test_a_search_is_resumed_with_the_same_checkpoint_only(wanted: Callable[..., GepaConfig], tmp_path: Path) -> None:
    model, output = tiny(tmp_path / "tiny"), tmp_path / "out"
    begun = wanted(model)
    output.mkdir()
    weights = search.digest_of(model)
    file = output / search.BEGUN
    file.write_text(json.dumps({**search._values(begun), search.WEIGHTS: weights}), encoding="utf-8")
    before = file.read_bytes()
    search.same_search(wanted(model, inference={"threads": 7, "replicas": 2}), output, weights)
    for changed, said in (
        ({"base_url": "http://e:1/v1"}, "base_url is 'http://e:1/v1', but the search in"),
        ({"inference": {"dtype": "bfloat16"}}, "inference.dtype is 'bfloat16', but the search in"),
        ({"seq_len": 1024}, "seq_len is 1024, but the search in"),
        ({"model": tiny(tmp_path / "other", seed=1)}, f"model is '{tmp_path / 'other'}', but the search in"),
    ):
        refused = refusal(wanted(**{"model": model, **changed}))
        assert refused.startswith(said)
        assert refused.endswith("choose another --output-dir, or start again with --clean-output-dir")
    tiny(model, seed=1)
    assert refusal(begun).startswith(f"model: the weights in {model} are not those that the search in {output}")
    assert list(output.iterdir()) == [file]
    assert file.read_bytes() == before


class Placed:
    """A placement whose processes end when a test says so."""

    def __init__(self) -> None:
        self.by_name: dict[str, Process] = {}
        self.lost = None
        self.news: list[Process] = []
        self.stopped: list[list[str]] = []
        self.logs_of: list[Path] = []

    def start(self, role: Role, command: Command) -> Process:
        self.logs_of.append(command.log)
        self.by_name[role.name] = Process(role.name, command.log)
        return self.by_name[role.name]

    def watch(self, timeout_s: float) -> list[Process]:
        found, self.news = self.news, []
        return found

    def stop(self, *, grace_s: float, names: list[str] | tuple[str, ...] = ()) -> None:
        self.stopped.append(list(names))
        for name in names or self.by_name:
            self.by_name[name].code = 0

    def ended(self, name: str) -> Process:
        self.by_name[name].code = -9
        self.news.append(self.by_name[name])
        return self.by_name[name]


def test_engines_stay_between_evaluations_and_one_that_died_is_started_again(tmp_path: Path) -> None:
    kept: Any = Placed()
    engines = Engines(tmp_path, kept, 1.0)
    role, other = Role("inference_0", "inference"), Role("inference_1", "inference")
    given = Command(["x"], {}, tmp_path / "evaluations" / "00001" / "logs" / "inference_0.log")

    def evaluation() -> tuple[Shared, Any]:
        own: Any = Placed()
        return Shared(own, engines), own

    first, own = evaluation()
    engine, late = first.start(role, given), first.start(other, given)
    worker = first.start(Role("env_a_0", "env-worker"), given)
    assert set(first.by_name) == {"inference_0", "inference_1", "env_a_0"}
    assert kept.logs_of[0] == tmp_path / "engine" / "logs" / "inference_0.log"
    first.stop(grace_s=1.0)
    assert (worker.code, engine.code, kept.stopped) == (0, None, [])
    # One has joined, the other has not.
    (tmp_path / "run").mkdir()
    record = {"engine": 0, "url": "http://e:1", "name": "inference_0"}
    (tmp_path / "run" / "engines.json").write_text(json.dumps([record]), encoding="utf-8")
    engines.keep(tmp_path, {})
    assert kept.stopped == [["inference_1"]]
    assert late.ended

    second, own = evaluation()
    assert second.start(role, given) is engine
    assert second.start(other, given) is not late
    dead = kept.ended("inference_1")
    assert second.watch(0.0) == [dead]
    # Of two that die, the one that is not the first to be started again is still reported.
    kept.ended("inference_0")
    dead = kept.ended("inference_1")
    assert second.start(role, given) is not engine
    assert second.watch(0.0) == [dead]
    second.stop(grace_s=1.0, names=["inference_0"])
    assert kept.stopped[-1] == ["inference_0"]
    assert own.stopped == []
    # The record of an earlier start says nothing about an engine of this one.
    second.start(role, given)
    second.start(other, given)
    engines.keep(tmp_path, {"inference_0": "http://e:1"})
    assert kept.stopped[-1] == ["inference_0", "inference_1"]


def test_those_that_serve_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from primerl.gepa import engines as module
    from primerl.launch.supervise.failures import RunFailedError
    from primerl.net.requests import UnansweredError

    told: list[Any] = []
    answers: list[Any] = [(200, {}), (409, {"error": "no"}), UnansweredError("gone")]

    def tell(*asked: Any, within_s: float) -> Any:
        told.append(asked)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "tell", tell)
    kept: Any = SimpleNamespace(by_name={"inference": Process("inference", tmp_path)}, stop=None)
    engines = Engines(tmp_path, kept, 1.0)
    engines.join("http://o:1")
    assert told == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "engines.json").write_text('[{"url": "http://e:1", "name": "inference"}]', encoding="utf-8")
    engines.keep(tmp_path, {})
    engines.join("http://o:1")
    assert told == [("http://o:1", "/engines/join", {"url": "http://e:1", "name": "inference"})]
    with pytest.raises(RunFailedError, match=r"was refused by http://o:2"):
        engines.join("http://o:2")
    with pytest.raises(RunFailedError, match=r"could not join http://o:3: gone"):
        engines.join("http://o:3")
