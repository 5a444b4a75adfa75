"""Processes that check something before a start, in the hands of who waits for them. Standard library only, so that the
one that imports verifiers, which takes seconds, can be under way while the config is still read."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from primerl.config import asked
from primerl.forking import preload, servers
from primerl.forking.exit_status import described
from primerl.launch import shadowing

ENVIRONMENTS = "primerl.launch.check_environments"
# Of this process: it is started for the next check, and used once.
_ahead: list[subprocess.Popen[str]] = []


@contextlib.contextmanager
def environments_ahead(arguments: Sequence[str] = (), *, fork: bool = True, checks: bool = True) -> Iterator[None]:
    """Within the block, what all environments need is being imported: by a fork server, of which the check and later
    the env workers are forks, or else by the process that checks, where the command `checks` them.

    It is ended with the block: a config that is refused has started nothing that stays. Called with the command line
    before the config is read, since it takes longest of a start and needs nothing of the config. `fork`: as the config
    has it, where it is known.
    """
    if asked.for_help(arguments):
        yield
        return
    with servers.launched(preload.ENVIRONMENTS, wanted=fork and servers.are_wanted(arguments)):
        if not checks or servers.address(preload.ENVIRONMENTS) is not None:
            yield
            return
        with _ahead_of_it():
            yield


@contextlib.contextmanager
def _ahead_of_it() -> Iterator[None]:
    with running(ENVIRONMENTS) as process:
        _ahead.append(process)
        try:
            yield
        finally:
            if process in _ahead:
                _ahead.remove(process)


@contextlib.contextmanager
def environments() -> Iterator[subprocess.Popen[str]]:
    """The process that was started ahead, or a new one."""
    if _ahead:
        yield _ahead.pop()
        return
    with running(ENVIRONMENTS) as process:
        yield process


@contextlib.contextmanager
def running(
    module: str, *arguments: str, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`python -m module`, killed where the block ends before it does."""
    pipe = subprocess.PIPE
    command = [python, "-m", module, *arguments]
    process = None
    try:
        server = servers.address(preload.ENVIRONMENTS) if module == ENVIRONMENTS and python == sys.executable else None
        with interrupted_after():
            if server is None:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
            else:
                process = _forked(command, server, environment)
        yield process
    finally:
        if process is not None:
            with process:
                if process.poll() is None:
                    process.kill()


def _forked(command: list[str], server: str, environment: Mapping[str, str] | None) -> subprocess.Popen[str]:
    from primerl.forking.popen import ForkedPopen

    pipe = subprocess.PIPE
    return ForkedPopen(
        command, address=server, at_once=True, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    )


@contextlib.contextmanager
def interrupted_after() -> Iterator[None]:
    """Ctrl-C has its effect when the block is done: within `Popen` it would leave a process that nobody knows of, and
    within an import pydantic makes another error of it, or nobody hears of it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # It is the main thread that is interrupted.
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)


def ended(
    process: subprocess.Popen[str], timeout_s: float, request: str = ""
) -> subprocess.CompletedProcess[str] | None:
    """None where it did not end in time."""
    try:
        stdout, stderr = process.communicate(request, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed, in its words, and which files may be why it had no better ones."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    # A traceback's last line is the error; a clean refusal is one line.
    words = lines[-1] if lines else f"{' '.join(done.args)} failed without a word: it {described(done.returncode)}"
    return words + shadowing.hint()
