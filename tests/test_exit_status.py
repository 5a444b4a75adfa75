"""How a process ended that is no child of who asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from primerl.forking import exit_status
from primerl.launch.placement.protocol import Process
from primerl.launch.supervise.watching import gave_up

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="pidfds are of Linux")]
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


def start(script: str) -> subprocess.Popen[str]:
    with forks.plain():
        return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_end_that_nobody_knows_is_not_said_to_be_a_signal(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels before 6.15, once the process has been taken from its id."""
    monkeypatch.setattr(exit_status, "_of_pidfd", lambda _: signal.SIGSEGV.value if is_told else None)
    process = start("pass")
    pidfd = os.pidfd_open(process.pid)
    try:
        process.communicate(timeout=30)
        assert exit_status.exit_code(process.pid, pidfd) == (-signal.SIGSEGV if is_told else None)
    finally:
        os.close(pidfd)
    described = exit_status.described(exit_status.NOT_KNOWN)
    assert described.startswith("has ended, killed or otherwise")
    assert not gave_up("trainer", Process("it", Path("log"), code=exit_status.NOT_KNOWN), True), "it is started again"


def test_the_status_of_a_zombie_is_that_of_its_end() -> None:
    process = start(SLEEPS)
    assert process.stdout is not None
    process.stdout.readline()
    pidfd = os.pidfd_open(process.pid)
    try:
        assert exit_status.exit_code(process.pid, pidfd) is None, "it lives"
        process.send_signal(signal.SIGTERM)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert exit_status.exit_code(process.pid, pidfd) == -signal.SIGTERM
        process.communicate(timeout=30)
        assert exit_status.exit_code(process.pid, pidfd) in (-signal.SIGTERM, None)
    finally:
        os.close(pidfd)
