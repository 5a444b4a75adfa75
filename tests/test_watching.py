"""What both launchers watch for: signals, killed processes, and an orchestrator that is silent or slow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from primerl.config.evaluation import EvalTimeouts
from primerl.launch import watching
from primerl.launch.starting import RunFailedError
from primerl.launch.watching import Interrupted, Interrupts, OrchestratorWatch, Restarts


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
    assert left_at(602.0, "trainer")


def watch(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any] | None) -> OrchestratorWatch:
    """Of an orchestrator that was heard at 0 s, and from then on says this."""
    timeouts = EvalTimeouts.model_validate({"start_s": 30, "no_progress_s": 60})
    watched = OrchestratorWatch(timeouts, Path("logs"))
    watched.url = "http://127.0.0.1:1"
    monkeypatch.setattr(watching.orchestrator_status, "fetch", lambda _: status)
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
