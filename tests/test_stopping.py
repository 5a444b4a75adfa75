"""Signals that ask a command to stop before its processes run: the exit code is the documented one, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from end_to_end import until
from primerl import cli
from primerl.launch import remote_workers
from primerl.launch.preflight import checker
from primerl.launch.supervise import detached
from primerl.launch.supervise.watching import Interrupted, Interrupts
from primerl.process import signals
from run_helpers import write_run

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """As a shell starts a command, whatever started these tests."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raises(number: signal.Signals) -> Callable[[list[str]], int]:
    def command(arguments: list[str]) -> int:
        signal.raise_signal(number)
        raise AssertionError("it went on")

    return command


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("rl", signal.SIGTERM, 130),
        ("rl", signal.SIGHUP, 130),
        ("rl", signal.SIGINT, 130),
        ("run resume x", signal.SIGTERM, 130),
        ("eval", signal.SIGHUP, 130),
        ("sft", signal.SIGTERM, 143),
        ("sft", signal.SIGHUP, 129),
        ("inference", signal.SIGTERM, 143),
        ("orchestrator", signal.SIGHUP, 129),
    ],
)
def test_the_exit_code_of_a_command_that_has_not_begun(
    words: str, number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "command", raises(number))
    assert cli.main(words.split()) == code
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_who_drops_the_interrupt_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bare `except` of some import does; or makes a complaint about the config of it."""

    def drops(arguments: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:  # noqa: BLE001 - which it must not do
            return 2
        return 0

    def goes_on(arguments: list[str]) -> int:
        drops(arguments)
        with checker.running("this"):
            raise AssertionError("it went on")

    def begins(arguments: list[str]) -> int:
        drops(arguments)
        with Interrupts() as interrupts, pytest.raises(Interrupted):
            interrupts.check()
        return 1

    for command in (drops, goes_on, begins):
        monkeypatch.setattr(cli, "command", command)
        assert cli.main(["rl"]) == 130


def test_a_hangup_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def command(arguments: list[str]) -> int:
        signal.raise_signal(signal.SIGHUP)
        assert signals.stop_signals() == [signal.SIGINT, signal.SIGTERM]
        return 0

    monkeypatch.setattr(cli, "command", command)
    assert cli.main(["rl"]) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_waits_for_the_end_of_imports(number: signal.Signals) -> None:
    class Dropping:
        """What a finalizer raises is dropped."""

        def __del__(self) -> None:
            signal.raise_signal(number)

    done = []

    def imports() -> None:
        with signals.held(second_passes=True), signals.held(second_passes=True):
            Dropping()
            done.append("imported")
        done.append("went on")

    with signals.AsInterrupts():
        before = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt):
            imports()
        assert signal.getsignal(number) is before
    assert done == ["imported"]


def test_a_second_signal_is_not_kept_waiting() -> None:
    done = []

    def imports() -> None:
        with signals.held(second_passes=True):
            signal.raise_signal(signal.SIGTERM)
            done.append("once")
            signal.raise_signal(signal.SIGINT)
            done.append("twice")

    with signals.AsInterrupts(), pytest.raises(KeyboardInterrupt):
        imports()
    assert done == ["once"]


def test_a_signal_that_ends_the_process_is_not_kept() -> None:
    with signals.held(second_passes=True):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_what_a_broken_import_raises_is_no_fault(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: list[str]) -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            raise ImportError("cannot load module more than once per process") from error
        return 0

    monkeypatch.setattr(cli, "command", command)
    assert cli.main(["sft"]) == code
    assert capsys.readouterr().err == "interrupted\n"


def test_without_a_signal_an_error_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_: list[str]) -> int:
        raise ImportError("no such thing")

    monkeypatch.setattr(cli, "command", command)
    with pytest.raises(ImportError, match="no such thing"):
        cli.main(["sft"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_start_of_a_process_is_not_torn(number: signal.Signals) -> None:
    done = []

    def starts() -> None:
        with signals.held():
            signal.raise_signal(number)
            done.append(True)
        raise AssertionError("it went on")

    with signals.AsInterrupts(), pytest.raises(KeyboardInterrupt):
        starts()
    assert done


def test_a_process_of_a_run_dies_by_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_RUN_MARK", "some")
    seen: list[Any] = []
    monkeypatch.setattr(cli, "command", lambda _: seen.append(signal.getsignal(signal.SIGTERM)) or 0)
    assert cli.main(["inference"]) == 0
    assert seen == [signal.SIG_DFL]


def test_a_worker_that_has_not_joined_ends_as_one_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_workers, "run", lambda _: signal.raise_signal(signal.SIGTERM))
    assert cli.main(["env-worker", "--join", "http://127.0.0.1:1", "--env", "e"]) == 0


HANGS = """
import os, subprocess, sys, time
far = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open("hangs.new", "w") as file:
    file.write(f"{os.getpid()} {far.pid}")
os.rename("hangs.new", "hangs")
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.processes
@linux
@pytest.mark.parametrize(
    ("command", "setting", "number"),
    [
        ("rl", forks.plain, signal.SIGTERM),
        ("rl", forks.own_servers, signal.SIGHUP),
        ("rl", forks.plain, signal.SIGKILL),
        ("rl", forks.own_servers, signal.SIGKILL),
        ("eval", forks.own_servers, signal.SIGTERM),
    ],
)
def test_nothing_is_left_of_checks(command: str, setting: Any, number: signal.Signals, tmp_path: Path) -> None:
    file = write_run(tmp_path)
    (tmp_path / "hang_env.py").write_text(HANGS)
    file.write_text(re.sub(r'id = "reverse-text"\ntaskset = .*', 'id = "hang-env"', file.read_text()))
    arguments = {
        "rl": ["rl", "@", "rl.toml"],
        "eval": ["eval", "hang-env", "-m", "tiny", "-o", "measured"],
    }
    with setting():
        process = subprocess.Popen(
            [sys.executable, "-m", "primerl", *arguments[command]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.fspath(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
    try:
        until(lambda: (tmp_path / "hangs").exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        check, far = map(int, (tmp_path / "hangs").read_text().split())
        assert lives(check)
        assert lives(far)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 130), said
        until(lambda: not lives(check) and not lives(far), 20)
        assert "Traceback" not in said
    finally:
        process.kill()


@pytest.mark.processes
def test_a_detached_launcher_outlives_its_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", os.fspath(tmp_path / "state"))
    started = []
    popen = subprocess.Popen

    def told(command: list[str], **options: Any) -> Any:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); raise SystemExit(3)"
        started.append(popen([sys.executable, "-c", code], **options))
        return started[0]

    monkeypatch.setattr(detached.subprocess, "Popen", told)
    assert detached.start([], tmp_path).code == 3
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
