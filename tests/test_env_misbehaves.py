"""Environments that end or block the process that they run in: their rollouts fail, and others go on.

The first tests are of one worker process against an orchestrator over HTTP, the others of whole evaluations.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end import until
from env_orchestrator import Orchestrator
from primerl._core import inspect_run
from test_env_worker import ENVIRONMENTS, START_S, Start, orchestrator, start
from test_eval import KEY, Endpoint, of_endpoint, serving

pytestmark = pytest.mark.processes

__all__ = ["orchestrator", "start"]  # fixtures

BLOCKED_S = 10.0
"""After which a worker's event loop counts as blocked."""


def unruly(*kinds: str, **settings: Any) -> dict[str, Any]:
    return {"environment": "unruly", "id": "unruly-env", "args": {"taskset": {"kinds": kinds, **settings}}}


def line_of(code: str) -> str:
    """`unruly_env.py:45`"""
    lines = (ENVIRONMENTS / "unruly_env.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip() == code]
    return f"unruly_env.py:{number}"


def offer(orchestrator: Orchestrator, start: Start, kinds: list[str]) -> tuple[Any, dict[str, int]]:
    """A worker, and a rollout of each kind that was leased to it. Its examples are in an order of their own."""
    worker = start(orchestrator, **unruly(*kinds), max_concurrent=len(kinds))
    rollouts = [orchestrator.add(example) for example in range(len(kinds))]
    orchestrator.wait("a chat of each", lambda: len(orchestrator.chats) == len(kinds), START_S)
    asked = {chat.rollout: str(chat.body["messages"][-1]["content"]).rstrip("?") for chat in orchestrator.chats}
    return worker, {asked[rollout]: rollout for rollout in rollouts}


def test_who_ends_the_process_has_failed_and_the_others_go_on(orchestrator: Orchestrator, start: Start) -> None:
    kinds = ["exits", "exits_in_a_task", "interrupts", "waits"]
    worker, rollouts = offer(orchestrator, start, kinds)
    for kind, words in {
        "exits": "sys.exit('no licence for this')",
        "exits_in_a_task": "sys.exit(3)",
        "interrupts": "raised KeyboardInterrupt",
    }.items():
        outcome = orchestrator.result(rollouts[kind])
        assert not outcome["ok"]
        assert outcome["error"]["kind"] == "environment"
        assert words in outcome["error"]["message"]
    before = len(orchestrator.heartbeats)
    orchestrator.wait("heartbeat", lambda: len(orchestrator.heartbeats) > before)
    assert orchestrator.heartbeats[-1][1]["running"] == [rollouts["waits"]]
    assert worker.process.poll() is None
    assert len(orchestrator.registrations) == 1
    orchestrator.finish()


def test_metrics_that_are_no_numbers_are_left_out(orchestrator: Orchestrator, start: Start) -> None:
    worker, rollouts = offer(orchestrator, start, ["plain"])
    outcome = orchestrator.result(rollouts["plain"])
    assert outcome["ok"], outcome["error"]
    assert outcome["traces"][0]["metrics"] == {"truth": 1.0, "whole": 3.0}
    assert "metric 'word' is not a finite number ('0.5')" in worker.text()
    assert "metric 'none'" not in worker.text()


@pytest.mark.parametrize(("kind", "code"), [("blocks", "time.sleep(3600)"), ("spins", "pass")])
def test_a_blocked_worker_says_where_and_ends_when_it_is_given_up(
    kind: str, code: str, orchestrator: Orchestrator, start: Start
) -> None:
    worker, rollouts = offer(orchestrator, start, [kind, "waits"])

    def told() -> dict[str, Any] | None:
        return next((body for _, body in orchestrator.heartbeats if body["still_s"] >= BLOCKED_S), None)

    orchestrator.wait("heartbeat of a blocked worker", lambda: told() is not None, 3 * BLOCKED_S)
    said = told()
    assert said is not None
    # A loop that spins is at its head or in its body.
    places = {line_of(code), line_of("while True:")} if kind == "spins" else {line_of(code)}
    assert said["held_at"] in places
    assert said["held_by"] == rollouts[kind]
    assert set(said["running"]) == set(rollouts.values())
    stack = re.compile(r'unruly_env\.py", line \d+ in conduct')
    until(lambda: stack.search(worker.text()), BLOCKED_S, "the stacks, which are written beside it")
    log = worker.text()
    assert "the environment has blocked the event loop for" in log
    assert f"rollout {rollouts[kind]}); all stacks:" in log

    # Nobody can tell its event loop: the client ends the process.
    orchestrator.blocked = "worker w was blocked by its environment"
    orchestrator.forget_workers()
    assert worker.exit_code(30) == 4
    assert "error: worker w was blocked by its environment" in worker.text()
    assert not orchestrator.results


# Whole evaluations


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving(Endpoint()) as served:
        yield served


def evaluate(
    served: Endpoint, output: Path, kinds: list[str], *more: str, once: Path | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    taskset = {"kinds": kinds, **({"once": str(once)} if once else {})}
    environment = json.dumps([{"id": "unruly-env", "name": "unruly", "taskset": taskset, **settings}])
    command = [sys.executable, "-m", "primerl", "eval", "--env", environment, "--max-tokens", "16"]
    variables = {
        **os.environ,
        "PRIMERL_TEST_KEY": KEY,
        "PYTHONPATH": os.pathsep.join([str(ENVIRONMENTS), *sys.path]),
    }
    return subprocess.run(
        [*command, "--output-dir", str(output), *of_endpoint(served), *more],
        capture_output=True,
        text=True,
        timeout=300,
        env=variables,
    )


def test_a_worker_that_dies_is_started_again_and_what_it_ran_is_named(endpoint: Endpoint, tmp_path: Path) -> None:
    done = evaluate(endpoint, tmp_path / "out", ["plain", "dies"], once=tmp_path / "once")
    assert done.returncode == 0, done.stdout + done.stderr
    words = r"env_unruly_0 exited with code 7.*; it ran rollout \d+ \(example \d\).*; it is started again"
    assert re.search(words, done.stdout), done.stdout
    rollouts = inspect_run(tmp_path / "out", "evaluated")["rollouts"]
    assert sorted(rollout["example"] for rollout in rollouts) == [0, 1]


def test_restarts_that_are_used_up_end_it_with_the_worker_its_exit_and_what_it_ran(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    done = evaluate(endpoint, tmp_path / "out", ["dies"], "--restarts", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert said.count("; it is started again") == 1, said
    words = (
        r"env_unruly_0 exited with code 7; it ran rollout \d+ \(example 0\), and was started again 1 times within 10 "
    )
    assert re.search(words + r"minutes, as often as `restarts` = 1 allows", said), said


def test_a_worker_that_is_blocked_is_named_given_up_and_started_again(endpoint: Endpoint, tmp_path: Path) -> None:
    once = tmp_path / "once"
    done = evaluate(endpoint, tmp_path / "out", ["blocks"], once=once, rollout_s=14.0)
    assert done.returncode == 0, done.stdout + done.stderr
    place = re.escape(line_of("time.sleep(3600)"))
    named = (
        rf"worker env_unruly_0 is blocked by its environment for 1\d s \({place}\), in rollout \d+: it gets no rollouts"
    )
    assert re.search(named, done.stdout), done.stdout
    ended = r"env_unruly_0 exited with code 4 \(.*was blocked by its environment for 1\d s.*; it is started again"
    assert re.search(ended, done.stdout), done.stdout
    (rollout,) = inspect_run(tmp_path / "out", "evaluated")["rollouts"]
    assert rollout["reward"] == 1.0
