"""The process that checks environments, started before it is known which."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.forking import servers
from primerl.forking.popen import ForkedPopen
from primerl.forking.preload import ENVIRONMENTS
from primerl.launch.preflight import checker, training
from primerl.launch.preflight.environments import Wanted
from test_config import tree

pytestmark = pytest.mark.processes
linux = pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux")


@pytest.mark.parametrize("setting", [forks.plain, forks.own_servers])
def test_the_process_started_ahead_is_the_one_that_is_asked_once(setting: Any) -> None:
    with setting(), checker.environments_ahead():
        with checker.environments() as ahead:
            request = json.dumps([["reverse-text", {}, {}, "train", 8], ["no-such-environment", {}, {}, "eval", 1]])
            done = checker.ended(ahead, 120, request)
        assert done is not None
        assert done.returncode == 0, done.stderr
        fine, (problem, remark, keys) = json.loads(done.stdout.splitlines()[-1])
        assert fine == [None, None, []]
        assert "cannot be imported" in problem
        assert remark is None
        assert keys == []  # it is about the environment as a whole
        with checker.environments() as another:
            assert another.pid != ahead.pid
            assert another.poll() is None
        assert another.poll() is not None


def test_nothing_is_left_of_it_where_the_config_is_refused() -> None:
    with forks.plain(), checker.environments_ahead():
        [(process, _)] = checker._ahead
        assert process.poll() is None
    assert process.returncode is not None
    assert checker._ahead == []


@linux
def test_nothing_is_left_of_a_fork_server_where_the_config_is_refused() -> None:
    with forks.own_servers(), checker.environments_ahead():
        assert servers._current is not None
        server, folder = servers._current.processes[ENVIRONMENTS], servers._current.folder
        assert checker._ahead == []
        with checker.environments() as process:  # which waits for the import until it is ended
            assert isinstance(process, ForkedPopen)
        assert process.returncode == -signal.SIGKILL
        assert server.poll() is None
    assert server.returncode is not None
    assert not folder.exists()


@pytest.mark.parametrize("arguments", [["--help"], ["@", "rl.toml", "--no-fork-server"], ["@", "rl.toml"]])
@pytest.mark.parametrize("checks", [True, False])
def test_the_command_line_decides_what_is_imported_ahead(
    arguments: list[str], checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all commands that run env workers: nothing for help, and without fork servers the process that checks."""
    begun: list[str] = []

    @contextlib.contextmanager
    def launched(*kinds: str, wanted: bool) -> Iterator[None]:
        begun.extend(kinds if wanted else [])
        yield

    @contextlib.contextmanager
    def running(module: str) -> Iterator[None]:
        begun.append(module)
        yield

    monkeypatch.setattr(servers, "launched", launched)
    monkeypatch.setattr(servers, "address", lambda kind: kind if kind in begun else None)
    monkeypatch.setattr(checker, "running", running)
    monkeypatch.delenv(servers.VARIABLE, raising=False)
    with checker.environments_ahead(arguments, checks=checks):
        if arguments == ["--help"]:
            assert begun == []
        elif "--no-fork-server" in arguments:
            assert begun == ([checker.ENVIRONMENTS] if checks else [])
        else:
            assert begun == [ENVIRONMENTS]


def test_who_does_not_end_in_time_is_told_apart() -> None:
    with checker.running("this") as process:  # prints, and ends
        assert checker.ended(process, 60) is not None
    with forks.plain(), checker.environments() as process:  # which has to import first
        assert checker.ended(process, 0.01) is None
    assert process.returncode is not None


FINE, REFUSES = "pass", "import sys; print('error: max_steps: no', file=sys.stderr); sys.exit(2)"
LONG, LATER = "import time; time.sleep(600)", "import time; time.sleep(1)"
EMPTY, USABLE = "print('[[\"has no examples\", null]]')", "print('[[null, null]]')"


@pytest.mark.parametrize(
    ("orchestrator", "environments", "problems"),
    [
        (REFUSES, LONG, ["max_steps: no"]),  # told at once, and the other one is ended
        (FINE, EMPTY, ["environment 'e': has no examples"]),
        (LATER, EMPTY, ["environment 'e': has no examples"]),  # which is waited for
        (FINE, USABLE, []),
    ],
)
def test_what_the_orchestrator_refuses_is_told_without_waiting_for_environments(
    orchestrator: str, environments: str, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"primerl": orchestrator, checker.ENVIRONMENTS: environments}
    started = []

    @contextlib.contextmanager
    def running(module: str, *_: str, **__: object) -> Iterator[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", programs[module]]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            started.append(process)
            yield process
            process.kill()

    monkeypatch.setattr(checker, "running", running)
    process = resolve.orchestrator(RLConfig.model_validate(tree(output_dir=str(tmp_path))))
    wanted = [Wanted("e", sys.executable, ("e", {}, {}, "train", 8))]
    began = time.monotonic()
    assert training.check_beside(process, wanted, 300, print, begins=True) == problems
    assert time.monotonic() - began < 60
    assert [one.returncode is not None for one in started] == [True, True]
