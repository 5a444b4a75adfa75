"""Env workers that join from elsewhere: what they are told, what is compared, how they come, wait and leave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import verifiers.v1 as vf
from docs_pages import shown
from end_to_end import start, steps_of, until
from env_orchestrator import Chat, completion
from env_orchestrator import Orchestrator as Double
from primerl._core import Orchestrator, inspect_run
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.env_worker import JoinConfig
from primerl.config.schema.environment import JoinedSettings
from primerl.config.schema.rl import RLConfig
from primerl.envs import listing
from primerl.envs.generations import v1
from primerl.forking import servers
from primerl.launch import remote_workers
from primerl.launch.placement.protocol import Process
from primerl.launch.report.console import Console
from primerl.net.requests import UnansweredError
from primerl.run_key import FILE, run_key, run_key_header
from pydantic import Field
from run_helpers import write_run
from test_orchestrator_in_process import begin, settings

# Of a loaded machine, for an import of verifiers.
START_S = 180.0
REVERSE = {"taskset": {"split": "train", "letters": "a-j", "min_length": 3, "max_length": 6}}


# What is compared


def test_a_listing_changes_with_any_example_that_is_looked_at() -> None:
    examples, key = [0, 1, 2], str
    whole = listing.listing_of("reverse-text", examples, key)
    assert (whole["first"], whole["last"]) == ("0", "2")
    assert whole == listing.listing_of("owner/reverse-text@0.1.0", examples, key)
    assert whole["digest"] != listing.listing_of("reverse-text", [examples[0], 7, examples[2]], key)["digest"]
    assert whole["digest"] != listing.listing_of("reverse-text", examples[::-1], key)["digest"]
    assert set(whole["packages"]) == {"reverse-text", "verifiers"}
    assert set(listing.packages_of("not-installed-anywhere")) == {"verifiers"}
    assert listing.looked_at(5) == [0, 1, 2, 3, 4]
    many = listing.looked_at(1_000_000)
    assert (len(many), many[0], many[-1]) == (listing.MOST_KEYS, 0, 999_999)
    assert many == sorted(set(many))


def test_examples_have_keys_by_which_they_are_found_in_other_runs() -> None:
    keys = listing.listing_of("reverse-text", [0, 1, 0], str)["keys"]
    assert keys[0] == keys[2] != keys[1]
    assert all(len(key) == 16 for key in keys)
    turned = listing.listing_of("reverse-text", [1, 0], str)["keys"]
    assert turned == [keys[1], keys[0]]
    many = listing.listing_of("reverse-text", range(5000), str)["keys"]
    assert len(many) == len(set(many)) == listing.MOST_PAIRED


def test_keys_hold_nothing_that_is_another_in_each_process() -> None:
    class Board:
        pass

    class Data(vf.TaskData):
        board: Any = None
        tags: set[str] = Field(default_factory=set)

    class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
        pass

    class Named(Task):
        @property
        def key(self) -> str:
            return f"{self.data.id} of {self.data.board}"

    def data(**more: Any) -> Data:
        return Data(prompt="Play.", tags={"b", "c", "a"}, **more)

    one, other = Board(), Board()
    assert repr(one) != repr(other)
    for task in (Task, Named):
        for form in (lambda board: board, str, lambda board: {"boards": [board], board: (1, board)}):
            keys = {v1.key(task(data(id="1", board=form(board)))) for board in (one, other)}
            assert len(keys) == 1, keys
        assert len({v1.key(task(data(id=name, board=one))) for name in "12"}) == 2
    # As verifiers has it, where there is nothing to leave out.
    plain = Task(Data(prompt="Play.", id="1", board={"cells": [1, None, "x"], "at": datetime(2026, 1, 2)}))
    assert v1.key(plain) == plain.key
    numbered = Task(Data(prompt="Play.", id="1", board={10: "a", 2: "b"}))
    assert v1.key(numbered) == v1.key(Task(Data(prompt="Play.", id="1", board={2: "b", 10: "a"})))
    assert listing.comparable({1: "a", "b": 2, None: 3}) == {"1": "a", "b": 2, "null": 3}
    assert listing.comparable({"lock": one, "rows": iter([1]), "seen": {"b", "a", "c"}, "raw": b"ab", "half": 0.5}) == {
        "lock": Board.__qualname__,
        "rows": "list_iterator",
        "seen": ["a", "b", "c"],
        "raw": "YWI=",
        "half": 0.5,
    }
    assert listing.comparable(f"a wall at 0x{id(one):x}, {one!r}") == f"a wall at 0x, {str(one).rpartition('x')[0]}x>"


def register(url: str, name: str, examples: int = 10, **fields: Any) -> httpx.Response:
    own = {"digest": "d", "first": "a", "last": "b", "packages": {"task": "0.1.0", "verifiers": "0.4.0"}, **fields}
    body = {"environment": "task", "role": "train", "name": name, "pid": 1, "examples": examples, "listing": own}
    return httpx.post(f"{url}/envs/register", json=body, headers=run_key_header(url), timeout=60)


def test_workers_are_told_their_environment_and_refused_where_they_differ(model: Path, tmp_path: Path) -> None:
    worker = {"args": {"agent": {"max_turns": 2}}, "seed": 3, "variables": ["JUDGE_KEY"]}
    environments = {"env": [{"id": "owner/task-env", "name": "task", "limits": {"turns": 4}, "worker": worker}]}
    with Orchestrator(settings(model, tmp_path / "out", train=environments)) as orchestrator:
        begin(orchestrator, tmp_path / "out")
        url = orchestrator.url
        key = run_key_header(url)
        ask = f"{url}/envs/config?environment=task"
        told = {
            "environment": "task",
            "role": "train",
            "id": "owner/task-env",
            "model": "m",
            "limits": {"turns": 4},
            "worker": JoinedSettings.model_validate(worker).model_dump(mode="json", exclude_none=True),
            "first": None,
        }
        assert httpx.get(ask, headers=key, timeout=60).json() == told
        for query in ("environment=tusk", "environment=task&role=eval"):
            answer = httpx.get(f"{url}/envs/config?{query}", headers=key, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "environment_unknown")
        assert register(url, "first").status_code == 200
        assert httpx.get(ask, headers=key, timeout=60).json()["first"]["listing"]["packages"]["task"] == "0.1.0"
        assert register(url, "second").status_code == 200
        newer = {"task": "0.2.0", "verifiers": "0.4.0"}
        for name, changes, difference in [
            ("other-version", {"packages": newer}, "has task 0.2.0 where the first one has 0.1.0"),
            ("not-installed", {"packages": {"verifiers": "0.4.0"}}, "has task none where the first one has 0.1.0"),
            ("shorter", {"examples": 9}, "lists 9 examples, the first one listed 10"),
            ("other-seed", {"digest": "e", "first": "c"}, "with another first one and the same last one"),
            ("other-data", {"digest": "e"}, "same first and last one, but others between them"),
        ]:
            refused = register(url, name, **changes)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "examples_differ")
            assert difference in refused.json()["error"]["message"]
            [line] = orchestrator.status()["refused_workers"]
            assert difference in line["reason"]


# The command


def test_addresses_that_are_none_are_refused() -> None:
    for url in ["http://host", "https://host:1", "host:1", "http://host:1/path", "http://host:port"]:
        with pytest.raises(ConfigError, match="give http://host:port"):
            remote_workers.check_address(url)
    remote_workers.check_address("http://host:1/")


class Joining:
    """`primerl env-worker --join` on what might be another machine: folder, home and state of its own."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.output = folder / "output"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "primerl", "env-worker", *arguments],
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "HOME": str(folder),
                    "PRIMERL_STATE_DIR": str(folder / "state"),
                    "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                    **variables,
                },
            )

    def text(self) -> str:
        return self.output.read_text()

    def says(self, words: str) -> None:
        until(lambda: words in self.text() or self.process.poll() is not None, START_S, words)
        assert words in self.text(), self.text()

    def exit_code(self) -> int:
        return self.process.wait(START_S)


Join = Callable[..., Joining]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    started: list[Joining] = []

    def launch(*arguments: str, **variables: str) -> Joining:
        started.append(Joining(tmp_path / f"machine_{len(started)}", *arguments, **variables))
        return started[-1]

    yield launch
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def run_says(**settings: Any) -> dict[str, Any]:
    """What a worker is told that joins."""
    return {
        "environment": "reverse",
        "role": "train",
        "id": "reverse-text",
        "model": "policy",
        "limits": {},
        "worker": {"args": REVERSE, **settings},
        "first": None,
    }


def test_a_lost_fork_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [["environments"], []]
    monkeypatch.setattr(servers, "_current", SimpleNamespace(lost=lambda: lost.pop(0)))
    said: list[str] = []
    processes: Any = SimpleNamespace(watch=lambda _: [], lost=None, by_name={"it": Process("it", Path("log"))})

    def say(message: str) -> None:
        said.append(message)
        workers.stop.set()
        processes.stop = lambda **_: None

    console: Any = SimpleNamespace(say=say)
    workers = remote_workers._Joining(JoinConfig(join="http://o:1", env="e"), {}, console)
    assert workers._watch(processes, {}) == 0
    assert said[0].startswith("the fork server of environments has ended; its processes continue")


@pytest.mark.processes
def test_a_worker_waits_for_its_orchestrator_and_hands_back_what_runs(join: Join) -> None:
    held = asyncio.Event()

    async def hold(chat: Chat) -> Any:
        await held.wait()
        return completion("never")

    with Double(reply=hold) as orchestrator:
        orchestrator.config = run_says(variables=["HERE_KEY", "ELSEWHERE_KEY"])
        orchestrator.stop()
        worker = join("--join", orchestrator.url, "--env", "reverse", HERE_KEY="x")
        worker.says("waiting for an orchestrator")
        orchestrator.start()
        worker.says("have the variables HERE_KEY, ELSEWHERE_KEY")
        worker.says("warning: not set here: ELSEWHERE_KEY;")
        rollout = orchestrator.add()
        orchestrator.wait("a model call", lambda: len(orchestrator.chats) == 1, START_S)
        [registration] = orchestrator.registrations
        assert registration["listing"]["packages"]["reverse-text"] == "0.1.0"
        assert registration["name"].startswith("env_reverse_0@")
        # Its rollout is still running.
        worker.process.send_signal(signal.SIGTERM)
        assert worker.exit_code() == 0, worker.text()
        assert orchestrator.left == [orchestrator.leased[rollout]]
        assert orchestrator.results == {}
    log = (worker.folder / "logs" / "envs" / "train" / "reverse" / "env_worker_0.log").read_text()
    assert "stopped by SIGTERM" in log


@pytest.mark.processes
def test_a_worker_that_has_missed_the_end_of_the_run_ends_with_the_others(join: Join) -> None:
    with Double() as orchestrator:
        orchestrator.config = run_says()
        workers = join("--join", orchestrator.url, "--env", "reverse", "--workers", "2")
        orchestrator.wait("two workers", lambda: len(orchestrator.registrations) == 2, START_S)
        log = workers.folder / "logs" / "envs" / "train" / "reverse" / "env_worker_1.log"
        found = re.search(r"worker env_reverse_1@\S+:(\d+)", log.read_text())
        assert found is not None
        late = int(found[1])
        os.kill(late, signal.SIGSTOP)
        orchestrator.finish()
        workers.says("env_reverse_0 has ended")
    os.kill(late, signal.SIGCONT)
    # Alone, it would look for the orchestrator until wait_s are up, and end with 1.
    assert workers.exit_code() == 0, workers.text()
    assert "the run is over" in workers.text()


def test_a_worker_that_was_told_to_end_is_not_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = False

    def ask(*_: Any, **__: Any) -> tuple[int, dict[str, Any]]:
        if is_there:
            return 200, {}
        raise UnansweredError("refused")

    monkeypatch.setattr(remote_workers, "ask", ask)
    workers = remote_workers._Joining(JoinConfig(join="http://o:1", env="e"), {}, Console())
    assert not workers._is_over(), "nobody has ended"
    workers.ended_at = time.monotonic() - remote_workers.LAST_WORDS_S
    assert not workers._is_over(), "one that was lost may be started again"
    workers.ended_at = time.monotonic() - remote_workers.OVER_S
    assert workers._is_over()
    is_there = True
    assert not workers._is_over()
    is_there = False
    assert not workers._is_over(), "lost later, by which the others are told nothing"


@pytest.mark.processes
def test_what_waiting_does_not_mend_ends_at_once(join: Join, model: Path, tmp_path: Path) -> None:
    """One real orchestrator, and none."""
    with Orchestrator(settings(model, tmp_path / "out")) as orchestrator:
        orchestrator.start()
        key = run_key(tmp_path / "out")
        assert key is not None
        wrong = join("--join", orchestrator.url, "--env", "tusk", PRIMERL_API_KEY=key)
        stranger = join("--join", orchestrator.url, "--env", "task")
        nobody = join("--join", "http://127.0.0.1:9", "--env", "task", "--wait-s", "0.5")
        assert wrong.exit_code() == 2
        assert "the run has no environment `tusk`; it has" in wrong.text()
        assert stranger.exit_code() == 2
        assert "the content of run/key in its folder" in stranger.text()
        assert nobody.exit_code() == 1
        assert "no orchestrator answered at http://127.0.0.1:9 within wait_s = 0.5 s" in nobody.text()


def test_settings_of_the_run_and_of_the_machine_make_the_workers(tmp_path: Path) -> None:
    config = JoinConfig(
        join="http://o:1/", env="e", workers=2, max_concurrent=4, metrics_port=9000, log_dir=str(tmp_path)
    )
    told = {
        "role": "eval",
        "id": "x",
        "limits": {"turns": 2},
        "worker": {"args": {"a": 1}, "seed": 5, "memory_mb": 2048, "cpus": 2},
    }
    made = remote_workers.workers(config, told, remote_workers._settings(told), {"KEY": "v"}, tmp_path / "files")
    assert [process.name for process in made] == ["env_e_0", "env_e_1"]
    one = made[1].config.model_dump()
    assert (one["orchestrator_url"], one["role"], one["id"], one["args"]) == ("http://o:1", "eval", "x", {"a": 1})
    assert (one["seed"], one["max_concurrent"], one["memory_mb"], one["metrics_port"]) == (5, 4, 2048, 9001)
    assert (one["cpus"], one["first_cpu"]) == (2, 2)
    assert (one["limits"]["turns"], one["unreachable_s"]) == (2, 300.0)
    assert made[1].variables == {"KEY": "v"}
    assert made[1].log == tmp_path / "envs" / "eval" / "e" / "env_worker_1.log"
    with pytest.raises(remote_workers.JoinRefusedError, match="install the run's version"):
        remote_workers._settings({"worker": {"added_later": 1}})


# The run


def test_the_run_says_whom_it_waits_for(tmp_path: Path) -> None:
    environment = {"id": "reverse-text", "num_workers": 0}
    orchestrator = {"train": {"env": [environment, {"id": "here"}]}, "host": "0.0.0.0"}
    config = RLConfig.model_validate({"max_steps": 1, "model": {"path": "m"}, "orchestrator": orchestrator})
    said = remote_workers.announcement(config, "http://0.0.0.0:77", tmp_path)
    assert said is not None
    assert "(with the run's PRIMERL_API_KEY in the environment)" in said
    (tmp_path / "run").mkdir()
    (tmp_path / FILE).write_text("k\n")
    made = remote_workers.announcement(config, "http://0.0.0.0:77", tmp_path)
    assert made is not None
    assert f"PRIMERL_API_KEY=$(cat {tmp_path}/run/key)" in made
    assert "--env reverse-text" in said
    assert "--env here" not in said
    assert ":77 " in said
    assert "0.0.0.0" not in said
    refused = [{"environment": "reverse-text", "reason": "lists 3 examples"}]
    waits = remote_workers.missing(config, {"workers": [], "refused_workers": refused})
    assert waits == ["no env worker of 'reverse-text' has joined (lists 3 examples)"]
    assert "timeouts.join_s = 600 s: no env worker of" in remote_workers.too_late(config, waits)
    assert remote_workers.missing(config, {"workers": [{"environment": "reverse-text"}]}) == []


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_a_run_without_workers_of_its_own_is_trained_by_those_that_join(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_API_KEY", "the-runs-key")
    file = write_run(tmp_path)
    output = tmp_path / "run"
    changes = {
        "--model.path": str(tmp_path / "tiny"),
        "--output-dir": str(output),
        "--orchestrator.train.env.0.num-workers": "0",
        "--orchestrator.train.env.0.limits.tokens": "3",
    }
    run = start(output, "@", str(file), *[word for pair in changes.items() for word in pair])
    try:
        address = output / "run" / "orchestrator.json"
        until(lambda: address.exists() or run.launcher.poll() is not None, START_S, "the orchestrator")
        url = json.loads(address.read_text())["url"]
        stranger = join("--join", url, "--env", "reverse-text", PRIMERL_API_KEY="another")
        assert stranger.exit_code() == 2
        assert "refuses the key" in stranger.text()
        # By another name than the one it listens on: the leases' addresses have to be of this one.
        reached = url.replace("127.0.0.1", "localhost")
        # The key is in the environment, as it is on the page.
        meant = {"PRIMERL_API_KEY=...": None, "http://orchestrator:8000": reached, "my-env": "reverse-text", "4": "2"}
        [[_, command, *arguments]] = shown(__file__, "docs/remote-workers.md", meant)
        assert command == "env-worker"
        workers = join(*arguments)
        code, text = run.ended(START_S)
        assert code == 0, text
        assert "waiting for env workers to join" in text
        assert workers.exit_code() == 0, workers.text()
        assert "the run is over" in workers.text()
    finally:
        run.kill()
    assert steps_of(output) == [1, 2]
    step = inspect_run(output, "step", 1)
    numbers = [line["rollout"] for group in step["groups"] for line in group["rollouts"]]
    ends = {inspect_run(output, "rollout", number)["reports"][0]["stop_condition"] for number in numbers}
    # A model with random weights does not stop by itself: some were cut, and trained.
    assert "limit_tokens" in ends
