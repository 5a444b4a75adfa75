"""The fork servers of one launch, in the hands of the process that starts a run. Standard library only.

    with launched(ENVIRONMENTS):           # before the config is read: the imports take seconds
        begin(True, TORCH)                 # once the config is known
        address(ENVIRONMENTS)              # for the guard; None where processes are to start the plain way

The variable PRIMERL_FORK_SERVER switches them off (`off`), or names a folder with the sockets of running servers that
another process has started: the tests of one pytest worker share theirs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

VARIABLE = "PRIMERL_FORK_SERVER"
OFF = "off"
FLAG = "--no-fork-server"
LOG_SUFFIX = ".log"
# A thread that waits for another sleeps. Spinning, the default, makes small models many times slower as soon as
# anything else runs on the machine. Read when the library is loaded, so by the server already.
OMP_WAIT_POLICY = "PASSIVE"
BACKLOG = 64


class Servers:
    """Those that this process has started, or that the variable names."""

    def __init__(self, folder: Path, *, own: bool, environment: Mapping[str, str] = os.environ) -> None:
        self.environment = environment
        self.folder = folder
        """A folder of mode 0700: who can connect can run anything as this user."""
        self.own = own
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ends: list[int] = []
        self._told: set[str] = set()

    def start(self, kind: str) -> None:
        """Returns at once. Does nothing where there is such a server, or was one, or where none can be had."""
        if self.own and kind not in self.processes:
            with contextlib.suppress(OSError):  # a full disk, say: everything starts the plain way
                self._start(kind)

    def _start(self, kind: str) -> None:
        lifeline, end = os.pipe()
        try:
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
                (self.folder / f"{kind}{LOG_SUFFIX}").open("wb") as log,
            ):
                listener.bind(os.fspath(self.folder / kind))
                listener.listen(BACKLOG)
                self.processes[kind] = subprocess.Popen(
                    command_of(kind, lifeline),
                    stdin=listener.fileno(),
                    stdout=log,
                    stderr=log,
                    env={"OMP_WAIT_POLICY": OMP_WAIT_POLICY, **self.environment},
                    pass_fds=(lifeline,),
                    start_new_session=True,  # Ctrl-C at the terminal is for its owner alone
                )
        except BaseException:
            os.close(end)
            raise
        finally:
            os.close(lifeline)
        self._ends.append(end)

    def address(self, kind: str) -> str | None:
        """Where the server of that kind listens, as soon as it has imported; None where there is none."""
        socket_file = self.folder / kind
        if kind in self.processes and self.processes[kind].poll() is not None:
            return None
        return os.fspath(socket_file) if socket_file.exists() else None

    def lost(self) -> list[str]:
        """Kinds of servers that have ended since the last call: whatever starts from now on starts the plain way."""
        ended = [kind for kind, process in self.processes.items() if process.poll() is not None]
        new = [kind for kind in ended if kind not in self._told]
        self._told.update(new)
        return new

    def close(self) -> None:
        while self._ends:
            os.close(self._ends.pop())
        for process in self.processes.values():
            process.kill()
            process.wait()
        if self.own:
            shutil.rmtree(self.folder, ignore_errors=True)


def command_of(kind: str, lifeline: int) -> list[str]:
    # The last argument is room for what `ps` is to show of its forks.
    return [sys.executable, "-m", "primerl.forking.server", kind, str(os.getpid()), str(lifeline), " " * 4096]


_current: Servers | None = None
_lock = threading.Lock()


def are_possible() -> bool:
    """Linux with what it takes, and nothing that watches how Python runs."""
    return (
        sys.platform == "linux"
        and sys.implementation.name == "cpython"
        and hasattr(os, "pidfd_open")
        and getattr(sys, "_is_gil_enabled", lambda: True)()
        and sys.gettrace() is None
        and sys.getprofile() is None
    )


@contextlib.contextmanager
def launched(*kinds: str, wanted: bool = True) -> Iterator[None]:
    """Within the block, processes are started by fork servers, where they are wanted and can be had.

    Within another such block, that one's servers are used.
    """
    global _current
    with _lock:
        servers = _of_variable() if wanted and _current is None and are_possible() else None
        if servers is not None:
            _current = servers
    if servers is None:
        if _current is not None:
            for kind in kinds:
                _current.start(kind)
        yield
        return
    try:
        for kind in kinds:
            servers.start(kind)
        yield
    finally:
        _current = None
        servers.close()


def _of_variable() -> Servers | None:
    value = os.environ.get(VARIABLE)
    if value == OFF:
        return None
    if value:
        return Servers(Path(value), own=False)
    try:
        return Servers(Path(tempfile.mkdtemp(prefix="primerl-fork-")), own=True)
    except OSError:
        return None


def begin(wanted: bool, *kinds: str) -> None:
    """Starts more servers, now that the config is known; where it wants none, ends those that were started ahead of
    it, and what starts from now on starts the plain way."""
    global _current
    if _current is None:
        return
    if not wanted:
        servers, _current = _current, None
        servers.close()
        return
    for kind in kinds:
        _current.start(kind)


def address(kind: str | None) -> str | None:
    return None if _current is None or kind is None else _current.address(kind)


def setting() -> str:
    """The variable's value for a process that is to use the same servers, or none either."""
    return OFF if _current is None else os.fspath(_current.folder)


def tell_lost(say: Callable[[str], None]) -> None:
    """Says so, once, of each server that has ended."""
    for kind in [] if _current is None else _current.lost():
        say(f"the fork server of {kind} has ended; its processes continue, and new ones start without it")


def are_wanted(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    """By the command line alone, which is known before the config is read."""
    return FLAG not in arguments and environment.get(VARIABLE) != OFF
