"""A run with fork servers of its own, and what their death means for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from end_to_end import Started, find, start, until
from primerl.forking.preload import ENVIRONMENTS, TORCH
from run_helpers import write_run

pytestmark = [pytest.mark.end_to_end, pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux")]
WORKER = "env_reverse-text_0"


def parent_of(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def server_of(run: Started, kind: str) -> int:
    pid = find("primerl.forking.server", kind, str(run.launcher.pid))
    assert pid is not None
    return pid


def test_a_run_outlives_its_fork_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with forks.own_servers():
        run = start(tmp_path / "outputs" / "small", "@", str(write_run(tmp_path)), "--max-steps", "100000")
    try:
        until(lambda: run.steps() >= 1, 120, "a step")
        run.note_mark()
        environments, torch = server_of(run, ENVIRONMENTS), server_of(run, TORCH)
        worker, trainer, engine = (run.pid_of(name) for name in (WORKER, "trainer", "inference"))
        assert [parent_of(pid) for pid in (worker, trainer, engine)] == [environments, torch, torch]
        for pid in (environments, torch):
            os.kill(pid, signal.SIGKILL)
        done = run.steps()
        until(lambda: run.steps() >= done + 2, 60, "steps without servers")
        assert (run.pid_of("trainer"), run.pid_of("inference")) == (trainer, engine)
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        again = until(lambda: run.pid_of(WORKER) not in (None, worker) and run.pid_of(WORKER), 60, "another worker")
        assert parent_of(again) == run.guard()
        done = run.steps()
        until(lambda: run.steps() >= done + 3, 90, "steps with the new worker")
        run.launcher.send_signal(signal.SIGINT)
        code, output = run.ended(60)
    finally:
        run.kill()
    assert code == 130
    for kind in (ENVIRONMENTS, TORCH):
        assert f"the fork server of {kind} has ended; its processes continue" in output
    assert re.search(rf"{WORKER} was killed by SIGKILL.*; it is started again", output)


def test_a_run_without_fork_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with forks.own_servers():
        given = ["@", str(write_run(tmp_path)), "--max-steps", "100000", "--no-fork-server"]
        run = start(tmp_path / "outputs" / "small", *given)
    try:
        until(lambda: run.steps() >= 1, 120, "a step")
        run.note_mark()
        guard = run.guard()
        assert [parent_of(run.pid_of(name)) for name in (WORKER, "trainer", "inference")] == [guard] * 3
        assert find("primerl.forking.server", str(run.launcher.pid)) is None
        run.launcher.send_signal(signal.SIGINT)
        assert run.ended(60)[0] == 130
    finally:
        run.kill()


def test_what_a_launch_leaves_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "primerl", "rl", "@", str(write_run(tmp_path)), "--dry-run"]
    with forks.own_servers():
        done = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
