"""The env worker process against an orchestrator over HTTP: leases, cancellation, loss and return of either side."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import outside
import pytest
from aiohttp import web
from env_orchestrator import Chat, Orchestrator, completion
from primerl.config.command_line.load import ConfigError
from primerl.config.schema.environment import TrainEnvironment
from primerl.envs import check, machine
from primerl.envs.generations import choice
from primerl.envs.settings import WorkerConfig
from primerl.launch.preflight import environments
from settings_helpers import refusal, worker_json

pytestmark = pytest.mark.processes

ENVIRONMENTS = Path(__file__).parent / "environments"
KINDS = ["plain", "reward_raises", "reward_blocks", "setup_cancels", "never_ends"]
MAIN = (
    "import json, sys; from primerl.envs.settings import WorkerConfig; from primerl.envs.worker import run_worker;"
    "from primerl.process.setting_checks import from_mapping; sys.exit(run_worker(from_mapping(WorkerConfig, "
    "json.loads(sys.argv[1]))))"
)
# Long enough for a loaded machine to import verifiers.
START_S = 180.0

Start = Callable[..., "Worker"]


class Worker:
    def __init__(self, log: Path, config: dict[str, Any]) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, worker_json(config)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ENVIRONMENTS), *sys.path])},
            )

    def text(self) -> str:
        return self.log.read_text()

    def exit_code(self, timeout: float = 90.0) -> int:
        return self.process.wait(timeout)


def example_of(kind: str) -> int:
    """Where a kind is in the worker's list, which is shuffled by seed 0."""
    order = list(KINDS)
    random.Random(0).shuffle(order)
    return order.index(kind)


def trial_config(**settings: Any) -> dict[str, Any]:
    return {"environment": "trial", "id": "trial-env", "args": {"taskset": {"kinds": KINDS, **settings}}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers; whatever is left of them at the end is killed."""
    workers: list[Worker] = []

    def launch(orchestrator: Orchestrator, **config: Any) -> Worker:
        base = {"orchestrator_url": orchestrator.url, "environment": "reverse", "id": "reverse-text"}
        workers.append(Worker(tmp_path / f"worker_{len(workers)}.log", {**base, **config}))
        return workers[-1]

    yield launch
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture
def orchestrator() -> Iterator[Orchestrator]:
    with Orchestrator() as double:
        yield double


async def answer_right(chat: Chat) -> web.Response:
    return completion(f"<r>{chat.last.removeprefix('Reverse: ')[::-1]}</r>")


# A worker takes seconds of CPU to import verifiers, so each test below takes one worker through a whole story.


@pytest.mark.parametrize(
    ("log", "seen"),
    [
        ({}, ["ours info", "theirs warning"]),
        ({"vf_level": "debug"}, ["ours info", "theirs debug", "theirs info", "theirs warning"]),
        ({"level": "error", "vf_level": "info"}, ["theirs info", "theirs warning"]),
        ({"level": "trace", "vf_level": "error"}, ["ours debug", "ours info"]),
    ],
)
def test_the_worker_and_verifiers_log_from_levels_of_their_own(log: dict[str, str], seen: list[str]) -> None:
    code = """
import json, logging, sys
from primerl.envs.settings import WorkerConfig
from primerl.envs.worker import log_to_stderr
from primerl.process.setting_checks import from_mapping
log_to_stderr(from_mapping(WorkerConfig, json.loads(sys.argv[1])).log)
ours, theirs = logging.getLogger("primerl.envs"), logging.getLogger("verifiers.v1.rollout")
ours.debug("ours debug"), ours.info("ours info")
theirs.debug("theirs debug"), theirs.info("theirs info"), theirs.warning("theirs warning")
"""
    given = worker_json({"orchestrator_url": "u", "environment": "e", "id": "e", "log": log})
    done = subprocess.run([sys.executable, "-c", code, given], check=True, capture_output=True, text=True)
    assert [line.rsplit(": ", 1)[1] for line in done.stderr.splitlines()] == seen


def test_a_level_that_is_none_is_refused() -> None:
    for log, message in [
        ({"vf_level": "loud"}, "log.vf_level: Input should be 'trace', 'debug'"),
        ({"lvl": "info"}, "log.lvl: unknown key"),
    ]:
        assert message in refusal(WorkerConfig, {"orchestrator_url": "u", "environment": "e", "id": "e", "log": log})


@pytest.mark.skipif(not machine.cores(), reason="this system binds no process to cores")
def test_a_worker_and_what_it_starts_run_on_so_many_cores() -> None:
    code = """
import os, subprocess, sys
from primerl.envs import machine
machine.limit_cores(int(sys.argv[1]), int(sys.argv[2]))
print(machine.cores() == sorted(os.sched_getaffinity(0)), machine.cores())
subprocess.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], check=True)
"""
    usable = machine.cores()
    for cpus, first in [(1, 0), (1, 1), (1, 2), (2, 1), (1000, 3)]:
        expected = sorted({usable[(first + number) % len(usable)] for number in range(min(cpus, len(usable)))})
        command = [sys.executable, "-uc", code, str(cpus), str(first)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout == f"True {expected}\n{expected}\n"
        assert len(expected) == min(cpus, len(usable))


def test_cores_that_are_none_are_refused() -> None:
    for given, message in [
        ({"cpus": 0}, "cpus: Input should be greater than 0"),
        ({"cpus": "two"}, "cpus: Input should be a valid integer"),
        ({"first_cpu": -1}, "first_cpu: Input should be greater than or equal to 0"),
    ]:
        assert message in refusal(WorkerConfig, {"orchestrator_url": "u", "environment": "e", "id": "e", **given})


def test_rollouts_are_leased_run_and_reported_by_a_worker_and_by_the_one_that_replaces_it(
    orchestrator: Orchestrator, start: Start
) -> None:
    orchestrator.reply = answer_right
    orchestrator.together = 8
    rollouts = [orchestrator.add(example) for example in range(60)]
    config = {"worker_name": "w0", "max_concurrent": 8, "args": {"taskset": {"num_examples": 60}}}
    first = start(orchestrator, **config)
    orchestrator.wait("results", lambda: len(orchestrator.results) == 60, START_S)
    [registration] = orchestrator.registrations
    assert set(registration.pop("listing")) == {"digest", "first", "last", "packages", "keys"}
    assert registration == {
        "environment": "reverse",
        "role": "train",
        "name": f"w0:{first.process.pid}",
        "pid": first.process.pid,
        "examples": 60,
        "whole_groups": False,
        "max_concurrent": 8,
    }
    sessions = {chat.rollout: chat.session for chat in orchestrator.chats}
    for rollout in rollouts:
        outcome = orchestrator.results[rollout]
        assert outcome["ok"]
        assert outcome["traces"][0]["reward"] == 1.0
        assert outcome["traces"][0]["session"] == sessions[rollout]
    assert {(chat.body["model"], chat.body["max_tokens"]) for chat in orchestrator.chats} == {("policy", 28)}
    assert len({chat.last for chat in orchestrator.chats}) == 60
    assert orchestrator.most_open == 8

    # Killed, and replaced by another process of the same configured name: it is not taken for the dead one.
    first.process.kill()
    assert first.exit_code() == -signal.SIGKILL
    second = start(orchestrator, **config)
    orchestrator.wait("second registration", lambda: len(orchestrator.registrations) == 2, START_S)
    assert orchestrator.registrations[1]["name"] == f"w0:{second.process.pid}"
    assert orchestrator.result(orchestrator.add())["ok"]

    # The run is over.
    orchestrator.finish()
    assert second.exit_code() == 0
    assert len(orchestrator.left) == 1


ACME = """
from contextlib import asynccontextmanager

def claims(environment_id):
    return environment_id.startswith("acme-")
def prepare():
    pass
def load(environment_id, arguments, root):
    return arguments["word"]
def list_examples(env, environment_id, seed, role="train", held_out=0):
    return [env, env * 2]
def key(example):
    return example
def scores_groups(env):
    return False
def remark(env, environment_id, role):
    return f"{environment_id} is of another kind"

class Runner:
    def __init__(self, post):
        self.post = post
    async def run(self, example, rollout, *, model, sampling, time_limit):
        body = b'{"model": "%s", "messages": [{"role": "user", "content": "%s"}]}' % (model.encode(), example.encode())
        status, _ = await self.post(f"{rollout.base_url}/chat/completions", rollout.api_key, "s", body, time_limit)
        trace = {"session": "s", "trainable": True, "ok": True, "reward": status / 200, "metrics": {}}
        trace |= {"stop_condition": None, "truncated": False}
        return {"ok": True, "traces": [trace], "error": None}

@asynccontextmanager
async def serving(env, root, post, limits=None):
    yield Runner(post)
"""


def test_environments_of_another_package_are_served(
    orchestrator: Orchestrator, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.use(monkeypatch, outside.install(tmp_path, "acme_envs", ACME, {choice.GROUP: "acme = acme_envs"}))
    assert check.check_environment("acme-words", {"word": "a"}).remark == "acme-words is of another kind"
    environments.check_installed([TrainEnvironment(id="acme-words")])
    with pytest.raises(ConfigError, match="environment 'other-words' cannot be imported"):
        environments.check_installed([TrainEnvironment(id="other-words")])
    rollout = orchestrator.add(1)
    worker = start(orchestrator, id="acme-words", args={"word": "one"})
    orchestrator.wait("the result", lambda: rollout in orchestrator.results, START_S)
    assert orchestrator.results[rollout]["traces"][0]["reward"] == 1.0
    assert [chat.last for chat in orchestrator.chats] == ["oneone"]
    orchestrator.finish()
    assert worker.exit_code() == 0


def test_a_generation_that_cannot_be_imported_refuses_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {choice.GROUP: "acme = acme_envs\nbroken = broken_envs"}
    outside.use(monkeypatch, outside.install(tmp_path, "acme_envs", ACME, points))
    assert check.check_environment("acme-words", {"word": "a"}).remark == "acme-words is of another kind"
    environments.check_installed([TrainEnvironment(id="acme-words"), TrainEnvironment(id="reverse-text")])
    # The missing one may be of the broken package.
    with pytest.raises(
        ConfigError, match=r"environment 'other-words' cannot be imported.*'broken', the entry point broken_envs"
    ):
        environments.check_installed([TrainEnvironment(id="other-words")])


def test_the_orchestrator_is_asked_past_the_users_proxy(
    orchestrator: Orchestrator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("ALL_PROXY", f"socks5://127.0.0.1:{nobody.getsockname()[1]}")
        worker = start(orchestrator)
        assert orchestrator.result(orchestrator.add())["ok"], worker.text()


def test_a_rollout_that_misbehaves_costs_nobody_else(orchestrator: Orchestrator, start: Start) -> None:
    usable = machine.cores()
    block_s = 4.0
    worker = start(orchestrator, max_concurrent=3, cpus=1, first_cpu=1, **trial_config(block_s=block_s))

    # An exception: a typed error for the orchestrator, a traceback for the log.
    failed = orchestrator.add(example_of("reward_raises"))
    outcome = orchestrator.result(failed, START_S)
    assert not outcome["ok"]
    assert outcome["error"]["kind"] == "environment"
    assert "the reward of this example cannot be computed" in outcome["error"]["message"]
    assert f"rollout {failed} (group {failed}, example {example_of('reward_raises')}) failed" in worker.text()
    assert 'trial_env.py", line' in worker.text()

    # All of it, threads and programs, is on the core that the worker was told.
    if usable:
        core = usable[1 % len(usable)]
        threads = [int(thread) for thread in os.listdir(f"/proc/{worker.process.pid}/task")]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
        assert f"bound to 1 of {os.cpu_count()} cores: {core}\n" in worker.text()

    # A cancellation nobody asked for is an error as well.
    outcome = orchestrator.result(orchestrator.add(example_of("setup_cancels")))
    assert outcome["error"]["kind"] == "environment"
    assert "CancelledError" in outcome["error"]["message"]

    # A reward that blocks the event loop: heartbeats continue meanwhile, or they would be further apart than it takes.
    before = len(orchestrator.heartbeats)
    orchestrator.result(orchestrator.add(example_of("reward_blocks")))
    moments = [moment for moment, _ in orchestrator.heartbeats[before:]]
    assert len(moments) >= 4
    assert max(later - earlier for earlier, later in itertools.pairwise(moments)) < block_s

    # An example that does not exist, and one that does not end within its lease.
    assert "does not exist" in orchestrator.result(orchestrator.add(99))["error"]["message"]
    late = orchestrator.result(orchestrator.add(example_of("never_ends"), deadline_s=0.5))
    assert late["error"]["kind"] == "timeout"

    # All capacity taken by rollouts that do not end; cancelling them makes room, and they report nothing.
    stuck = [orchestrator.add(example_of("never_ends")) for _ in range(3)]
    orchestrator.wait("leases", lambda: set(stuck) <= set(orchestrator.leased))
    held = orchestrator.add(example_of("plain"))
    for rollout in stuck:
        orchestrator.cancel(rollout)
    assert orchestrator.result(held)["ok"]
    assert not set(stuck) & set(orchestrator.results)

    # Told to stop while a rollout runs: it says goodbye, reports nothing, and is gone.
    last = orchestrator.add(example_of("never_ends"))
    orchestrator.wait("lease", lambda: last in orchestrator.leased)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert len(orchestrator.left) == 1
    assert last not in orchestrator.results


def test_a_worker_outlives_every_loss_but_a_lasting_one(orchestrator: Orchestrator, start: Start) -> None:
    async def never(chat: Chat) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    # Cancelled while the model is asked: it hangs up, which aborts the engine's request.
    orchestrator.reply = never
    cancelled = orchestrator.add()
    worker = start(orchestrator, unreachable_s=5.0)
    orchestrator.wait("chat request", lambda: len(orchestrator.chats) == 1, START_S)
    orchestrator.cancel(cancelled)
    orchestrator.wait("disconnect", lambda: orchestrator.hung_up == [cancelled])
    orchestrator.wait("heartbeat without it", lambda: orchestrator.heartbeats[-1][1]["running"] == [])

    # Forgotten by the orchestrator: its rollouts are dropped, and it registers again.
    lost = orchestrator.add()
    orchestrator.wait("chat request", lambda: len(orchestrator.chats) == 2)
    orchestrator.forget_workers()
    orchestrator.wait("second registration", lambda: len(orchestrator.registrations) == 2)
    orchestrator.wait("disconnect", lambda: orchestrator.hung_up == [cancelled, lost])
    assert orchestrator.registrations[0]["name"] == orchestrator.registrations[1]["name"]
    assert "does not know this worker" in worker.text()
    orchestrator.reply = answer_right
    assert orchestrator.result(orchestrator.add())["ok"]

    # The orchestrator goes away and comes back, with no memory of its workers.
    orchestrator.stop()
    orchestrator.forget_workers()
    orchestrator.start()
    orchestrator.wait("third registration", lambda: len(orchestrator.registrations) == 3)
    assert orchestrator.result(orchestrator.add())["ok"]
    assert not {cancelled, lost} & set(orchestrator.results)

    # It goes away for good: the worker gives up and says so.
    orchestrator.stop()
    assert worker.exit_code() == 1
    assert f"orchestrator {orchestrator.url} did not answer for" in worker.text()
    orchestrator.start()


def test_a_refused_worker_exits_2_with_the_reason(orchestrator: Orchestrator, start: Start) -> None:
    orchestrator.refuse = web.Response(status=404, text="no environment 'reverse' in this run; it has 'reverse-text'")
    worker = start(orchestrator)
    assert worker.exit_code(START_S) == 2
    assert "no environment 'reverse' in this run" in worker.text()


def test_an_environment_that_cannot_be_imported_exits_2_and_is_named(orchestrator: Orchestrator, start: Start) -> None:
    worker = start(orchestrator, id="no-such-environment")
    assert worker.exit_code(START_S) == 2
    assert "error: environment 'no-such-environment' cannot be imported" in worker.text()
    assert orchestrator.registrations == []


def test_the_check_is_a_command_whose_last_line_says_what_is_wrong() -> None:
    command = [sys.executable, "-m", "primerl.envs.check", "reverse-text", '{"taskset": {"lenght": 3}}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 2
    assert "taskset.lenght" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reverse-text"], None),
        (["reverse-text", '{"taskset": {"split": "eval"}}'], None),
        (["no-such-environment"], "environment 'no-such-environment' cannot be imported"),
        (["reverse-text", "{"], "not JSON"),
        ([], "usage"),
        (["--help"], None),
        (["--no-such-option"], "usage"),
    ],
)
def test_the_check_accepts_or_says_in_one_line_what_is_wrong(
    arguments: list[str], words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = check.main(arguments)
    said = capsys.readouterr().err.strip().splitlines()
    if words is None:
        assert (code, said) == (0, [])
    else:
        assert code == 2
        assert words in said[-1]
        assert len(said) == 1
    if arguments == ["no-such-environment"]:
        assert check.main([*arguments, "--traceback"]) == 2
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"orchestrator_url": None}, "orchestrator_url: Input should be a valid string"),
        ({"seeds": 1}, "seeds: unknown key; did you mean 'seed'?"),
        ({"role": "test"}, "role: Input should be 'train' or 'eval'"),
        ({"max_concurrent": 0}, "max_concurrent: Input should be greater than 0"),
        ({"unreachable_s": 0}, "unreachable_s: Input should be greater than 0"),
    ],
)
def test_a_config_is_refused_by_the_name_of_its_key(values: dict[str, Any], words: str) -> None:
    given = {"orchestrator_url": "u", "id": "x", "environment": "x"}
    assert "orchestrator_url: missing" in refusal(WorkerConfig, {"id": "x", "environment": "x"})
    assert words in refusal(WorkerConfig, {**given, **values})
