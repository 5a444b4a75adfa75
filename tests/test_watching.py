"""What both launchers watch for: signals, killed processes, and an orchestrator that is silent or slow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from primerl.config.schema.evaluation import EvalTimeouts
from primerl.launch.placement.protocol import Process
from primerl.launch.report.evaluations import Evaluated
from primerl.launch.report.notices import Remarks
from primerl.launch.supervise import orchestrator, watching
from primerl.launch.supervise.failures import RunFailedError
from primerl.launch.supervise.orchestrator import Ended, OrchestratorWatch
from primerl.launch.supervise.watching import Interrupted, Interrupts, Restarts, gave_up


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """As of a command in a terminal. In the background of a shell the tests would inherit that SIGINT is ignored, and
    under nohup SIGHUP."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_signal_waits_until_it_is_asked_for_and_a_second_ctrl_c_does_not() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert signal.getsignal(number) is signal.default_int_handler


def test_what_the_caller_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGHUP)
        interrupts.check()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_restarts_are_counted_by_process_within_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = Restarts(2)

    def left_at(now: float, name: str) -> bool:
        monkeypatch.setattr(watching.time, "monotonic", lambda: now)
        return restarts.has_one_left(name)

    assert [left_at(now, "trainer") for now in (0.0, 1.0, 2.0)] == [True, True, False]
    assert left_at(2.0, "orchestrator")
    assert restarts.used_up("orchestrator") == ""
    assert restarts.used_up("trainer") == (
        ", and was started again 2 times within 10 minutes, as often as `restarts` = 2 allows"
    )
    assert left_at(602.0, "trainer")
    assert restarts.used_up("trainer") == ""


def test_restarts_that_are_none_are_named() -> None:
    restarts = Restarts(0)
    assert not restarts.has_one_left("env")
    assert restarts.used_up("env") == ", and `restarts` = 0 does not allow to start it again"


@pytest.mark.parametrize(
    ("kind", "code", "was_registered", "gave"),
    [
        ("trainer", -9, False, False),
        ("trainer", 1, True, True),
        ("env-worker", 7, True, False),
        # Before it has begun to work: the environment cannot be loaded.
        ("env-worker", 1, False, True),
        # Refused, and could not be started.
        ("env-worker", 2, True, True),
        ("env-worker", None, True, True),
    ],
)
def test_only_a_worker_that_has_begun_to_work_is_started_again_when_it_exits(
    kind: str, code: int | None, was_registered: bool, gave: bool
) -> None:
    ended = Process("p", Path("p.log"), pid=1, code=code)
    assert gave_up(kind, ended, was_registered) == gave


def test_what_a_worker_ran_is_named_as_far_as_it_is_few() -> None:
    assert Ended().told() == ""
    assert Ended(True, ["rollout 1 (example 2)"]).told() == "; it ran rollout 1 (example 2)"
    many = Ended(True, [f"rollout {number} (example 0)" for number in range(10)]).told()
    assert many.endswith("rollout 7 (example 0) and 2 others")


def test_a_blocked_worker_and_the_first_failure_of_a_kind_are_told_once() -> None:
    said: list[str] = []
    remarks = Remarks(said.append)
    before = {"timeout": {"rollout": 1, "example": 0, "message": "of an earlier start"}}
    blocked = {"since_s": 12.3, "at": "task/rewards.py:28", "rollout": 5}
    worker = {"worker": 3, "name": "env_task_0:77", "running": 4, "blocked": blocked}

    def look(errors: dict[str, Any], **worker: Any) -> list[str]:
        said.clear()
        remarks.look({"environments": [{"name": "task", "first_errors": errors}], "workers": [worker]})
        return list(said)

    assert look(before, worker=3) == []
    failed = {**before, "environment": {"rollout": 7, "example": 2, "message": "ValueError: x"}}
    assert look(failed, worker=3) == [
        "the first rollout of 'task' has failed by an error of kind environment: ValueError: x (rollout 7, example 2)"
    ]
    assert look(failed, **worker) == [
        "worker env_task_0 is blocked by its environment for 12 s (task/rewards.py:28), in rollout 5: it gets no "
        "rollouts, none of its 4 proceeds, and it is started again when the time of one is up; all stacks are in its "
        "log"
    ]
    assert look(failed, **worker) == []
    assert look(failed, worker=3) == []
    assert len(look(failed, **worker)) == 1, "another block"


def test_an_environment_that_rests_and_comes_back_is_told_once() -> None:
    said: list[str] = []
    remarks = Remarks(said.append)
    good = {"name": "good"}
    for _ in range(2):
        remarks.look({"environments": [good, {"name": "bad", "rests": "the judge is away"}]})
    assert said == [
        "warning: environment 'bad' is paused: the judge is away. The other environments continue",
    ]
    remarks.look({"environments": [good, {"name": "bad"}]})
    assert said[1:] == ["environment 'bad' is used again"]


def test_an_evaluation_whose_rollouts_fail_is_told_once() -> None:
    said: list[str] = []
    evaluated = Evaluated(said.append)
    report = {"environment": "math", "version": 3, "complete": True, "rollouts": 40, "failed": 2, "errors": {}}
    evaluated.look([report])
    assert len(said) == 1, "a few"
    failing = {**report, "version": 4, "failed": 39, "errors": {"environment": 38, "timeout": 1}}
    for _ in range(2):
        evaluated.look([report, failing])
    line = said[2]
    assert len(said) == 3
    assert line.startswith(
        "warning: in the evaluation of 'math' at version 4, 39 of 40 rollouts failed (38 by errors of kind "
        "environment, 1 by errors of kind timeout) and count as 0"
    )


def test_a_run_without_a_signal_ends_and_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = [{"name": "hard", "filtered_in_a_row": 135}, {"name": "rests", "filtered_in_a_row": 0}]
    watched = watch(monkeypatch, None)
    moving = {"buffer": buffer, "rollouts": {"filtered": 1}}
    watched.check_progress({**moving, "without_signal_s": None}, 1.0)
    watched.check_progress({**moving, "without_signal_s": 60.0}, 2.0)
    words = r"no group has had a signal for 61 s, longer than timeouts.no_progress_s = 60 s.*'hard' 135\).*group_size"
    with pytest.raises(RunFailedError, match=words):
        watched.check_progress({**moving, "rollouts": {"filtered": 9}, "without_signal_s": 61.0}, 3.0)


def watch(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any] | None) -> OrchestratorWatch:
    """Of an orchestrator that was heard at 0 s, and from then on says this."""
    timeouts = EvalTimeouts.model_validate({"start_s": 30, "no_progress_s": 60})
    watched = OrchestratorWatch(timeouts, Path("logs"))
    watched.url = "http://127.0.0.1:1"
    monkeypatch.setattr(orchestrator.orchestrator_status, "fetch", lambda _: status)
    monkeypatch.setattr(watching.time, "monotonic", lambda: 0.0)
    watched.begin()
    return watched


def test_an_orchestrator_may_miss_a_question_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, None)
    assert watched.ask(20.0) is None
    with pytest.raises(RunFailedError, match=r"^orchestrator has not answered http://127.0.0.1:1/status for 21 s$"):
        watched.ask(21.0)
    watched = watch(monkeypatch, {"run": {}})
    assert watched.ask(21.0) == {"run": {}}
    assert watched.heard == 21.0


def test_a_slow_start_is_told_by_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, None)
    watched.check_start(["no inference engine has joined"], 30.0)
    slow = (
        r"^not everything was ready within timeouts.start_s = 30 s: no inference engine has joined \(logs: logs\); "
        "raise it where the start is only slow$"
    )
    with pytest.raises(RunFailedError, match=slow):
        watched.check_start(["no inference engine has joined"], 31.0)


def test_nothing_may_stand_still_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, None)
    watched.ready(10.0)
    waits = [{"who": "trainer", "for": "2 of 8 groups", "since_s": 61.0}]
    watched.check_progress({"tokens": {"sampled": 1}}, 20.0)
    watched.check_progress({"tokens": {"sampled": 1}}, 80.0)
    still = r"^nothing has moved for timeouts.no_progress_s = 60 s: trainer waits for 2 of 8 groups \(61 s\)$"
    with pytest.raises(RunFailedError, match=still):
        watched.check_progress({"tokens": {"sampled": 1}, "waits": waits}, 81.0)
    watched.check_progress({"tokens": {"sampled": 2}}, 82.0)


def test_an_orchestrator_that_comes_back_is_where_the_others_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, None)
    monkeypatch.setattr(watching.time, "monotonic", lambda: 50.0)
    for url in ("http://127.0.0.1:1", None):
        watched.begin_again(url)
        assert watched.heard == 50.0
    with pytest.raises(RunFailedError, match=r"^orchestrator was at http://127.0.0.1:1, and that port was taken"):
        watched.begin_again("http://127.0.0.1:2")
