"""Processes that check something before a start, in the hands of who waits for them. Standard library only, so that the
one that imports verifiers, which takes seconds, can be under way while the config is still read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from primerl.config.command_line.arguments import asks_for_help
from primerl.forking import preload, servers
from primerl.forking.exit_status import described
from primerl.launch.preflight import shadowing
from primerl.launch.supervise.processes import Processes
from primerl.launch.supervise.trees import MARK
from primerl.process import signals

ENVIRONMENTS = "primerl.launch.preflight.check_environments"
# This process's checker: started for the next check, used once, then closed.
_ahead: list[tuple[subprocess.Popen[str], contextlib.ExitStack]] = []


@contextlib.contextmanager
def environments_ahead(arguments: Sequence[str] = (), *, fork: bool = True, checks: bool = True) -> Iterator[None]:
    """Within the block, what all environments need is being imported: by a fork server, of which the check and later
    the env workers are forks, or else by the process that checks, where the command `checks` them.

    It is ended with the block: a config that is refused has started nothing that stays. Called with the command line
    before the config is read, since it takes longest of a start and needs nothing of the config. `fork`: as the config
    has it, where it is known.
    """
    if asks_for_help(arguments):
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
    with contextlib.ExitStack() as open_ones:
        _ahead.append((open_ones.enter_context(running(ENVIRONMENTS)), open_ones))
        try:
            yield
        finally:
            _ahead[:] = [(process, stack) for process, stack in _ahead if stack is not open_ones]


@contextlib.contextmanager
def environments() -> Iterator[subprocess.Popen[str]]:
    """The process that was started ahead, or a new one."""
    if _ahead:
        process, open_ones = _ahead.pop()
        with open_ones:
            yield process
        return
    with running(ENVIRONMENTS) as process:
        yield process


class _Keeper:
    """The guard of all processes that check something now: whatever carries its mark ends with them, and with this
    process, even by SIGKILL. That is also what an environment has started while it was imported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._processes: Processes | None = None

    @contextlib.contextmanager
    def mark(self) -> Iterator[str]:
        with self._lock:
            if self._processes is None:
                self._processes = Processes()
            processes, self._users = self._processes, self._users + 1
        try:
            yield processes.mark
        finally:
            with self._lock:
                self._users -= 1
                is_last = not self._users
                if is_last:
                    self._processes = None
            if is_last:
                processes.kill()
                processes.close()


_keeper = _Keeper()


@contextlib.contextmanager
def running(
    module: str, *arguments: str, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`python -m module`, killed where the block ends before it does, with all that it has started."""
    signals.check()
    command = [python, "-m", module, *arguments]
    with contextlib.ExitStack() as stack:
        with signals.held():
            marked = {**(os.environ if environment is None else environment), MARK: stack.enter_context(_keeper.mark())}
            process = _started(command, module, marked)
            stack.callback(_end, process)
        yield process


def _started(command: list[str], module: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    options: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "encoding": "utf-8", "env": environment}
    is_own = module == ENVIRONMENTS and command[0] == sys.executable
    server = servers.address(preload.ENVIRONMENTS) if is_own else None
    if server is None:
        return subprocess.Popen(command, **options)
    from primerl.forking.popen import ForkedPopen

    return ForkedPopen(command, address=server, at_once=True, **options)


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        if process.poll() is None:
            process.kill()


def ended(
    process: subprocess.Popen[str], timeout_s: float, request: str = ""
) -> subprocess.CompletedProcess[str] | None:
    """None where it did not end in time."""
    signals.check()
    try:
        stdout, stderr = process.communicate(request, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed, in its words, and which files may be why it had no better ones."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    # A traceback's last line is the error; a clean refusal is one line.
    words = lines[-1] if lines else f"{' '.join(done.args)} failed without output: it {described(done.returncode)}"
    return words + shadowing.hint()
