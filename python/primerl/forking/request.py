"""Asks a fork server for a process, and learns how it ends. Standard library only.

One connection a process (a Unix socket that keeps packets apart), one JSON object a packet:

    server -> requester    {"ready": true}             once it has imported
    requester -> server    what `described` says, with four descriptors: standard input, output and
                           error, and the reading end of the lifeline
    server -> requester    {"refused": why}            start it the plain way
    process -> requester   {"pid": process id}         it is all that it will be, and waits
    requester -> process   go
    process -> requester   {"exit": code, "cpu_s"}     its last act, where it exits
    server -> requester    {"status": as of wait(), "cpu_s"}

Descriptors are sent only once the server is ready: one that hangs would keep a pipe open whose end others wait for.

The lifeline is a pipe that is never written to: the kernel kills the process when the requester closes its end, or
dies. It stands for PR_SET_PDEATHSIG, as the process is the server's child and has to outlive the server. A server that
is killed takes nothing with it: the processes hold the other end of their connections, which close when they end. How
such a process ended, the kernel tells (`exit_status`), or its own last message, or it is not known.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from primerl.forking.exit_status import NOT_KNOWN, exit_code
from primerl.launch.supervise.trees import without_own_group

# A server that still imports answers when it is ready; after this long the process starts without it.
FORK_WAIT_S = 30.0
# From the end of a process until its server has reported how it ended; a server that hangs reports nothing.
TOLD_S = 2.0
# A packet that is larger than the kernel's buffer is refused by it; the process then starts the plain way.
LARGEST_PACKET = 1 << 20
GO = b"go"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


class Forked:
    """A process that was asked for. Its requester calls `look` when one of `sources` can be read, and at `until`.

    `refusal` is set where the requester has to start it itself (`timed_out`: since the server did not answer in time),
    `pid` once it has begun, `code` (below 0: the signal's number, or NOT_KNOWN) and `cpu_s` once it has ended.
    """

    def __init__(
        self,
        address: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: tuple[int, int, int],
        *,
        cwd: str | None = None,
        session: bool = True,
        ignored: Sequence[int] = (),
        begins: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """`descriptors`: standard input, output and error of the process; `ignored`: signals that it ignores; `begins`:
        called with its process id before it does anything. Raises OSError where no server takes it."""
        self._begins = begins
        self.pid: int | None = None
        self.code: int | None = None
        self.cpu_s = 0.0
        self.refusal: str | None = None
        self.timed_out = False
        self.until = time.monotonic() + FORK_WAIT_S
        self._pidfd = -1
        """Readable once the process has ended, whatever the server does."""
        self._has_gone = False
        self._is_lost = False  # neither server nor process holds the other end of the connection
        self._last_word: int | None = None
        self._lifeline = -1
        self._request = described(command, environment, cwd, session=session, ignored=ignored)
        self._descriptors: list[int] = []
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A server that accepts nothing may not hold up the requester.
            self._connection.setblocking(False)
            self._connection.connect(address)
            self._connection.setblocking(True)
            for descriptor in descriptors:
                self._descriptors.append(os.dup(descriptor))
        except BaseException:
            self.close()
            raise

    def sources(self) -> list[int]:
        """Descriptors that can be read as soon as there is something to learn."""
        if self.refusal is not None or self.code is not None:
            return []
        connection = [] if self._is_lost else [self._connection.fileno()]
        return connection if self._has_gone or self._pidfd < 0 else [*connection, self._pidfd]

    def look(self) -> None:
        """Takes what messages there are, and notes what the time has decided. Waits for nothing."""
        while self._is_open() and readable([self._connection.fileno()], 0.0):
            self._receive()
        if self.refusal is not None or self.code is not None:
            return
        if self.pid is None:
            if time.monotonic() >= self.until:
                self.refusal, self.timed_out = f"the fork server did not answer within {FORK_WAIT_S:g} s", True
            return
        if not self._has_gone and (self._pidfd < 0 or readable([self._pidfd], 0.0)):
            self._has_gone, self.until = True, time.monotonic() + TOLD_S
        if self._has_gone and (self._is_lost or time.monotonic() >= self.until):
            self.code = self._known_code(self.pid)

    def _is_open(self) -> bool:
        return self.refusal is None and self.code is None and not self._is_lost

    def _receive(self) -> None:
        try:
            data = self._connection.recv(LARGEST_PACKET)
        except OSError:
            data = b""
        if not data:
            self._is_lost = True
            if self.pid is None:
                self.refusal = "the fork server has ended"
            return
        message = json.loads(data)
        if "ready" in message:
            self._ask()
        elif "refused" in message:
            self.refusal = message["refused"]
        elif "pid" in message:
            self._begin(message["pid"])
        elif "exit" in message:
            self._last_word, self.cpu_s = message["exit"], message["cpu_s"]
        elif self.pid is None:
            self.refusal = f"it ended before it had begun (status {message['status']})"
        else:
            self.code, self.cpu_s = os.waitstatus_to_exitcode(message["status"]), message["cpu_s"]

    def _ask(self) -> None:
        lifeline, self._lifeline = os.pipe()
        try:
            socket.send_fds(self._connection, [self._request], [*self._descriptors, lifeline])
        except OSError as error:  # a request that is too large, say
            self.refusal = f"the fork server cannot be asked: {error}"
        finally:
            os.close(lifeline)
            self._let_go()

    def _begin(self, pid: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            pass  # It has just died, which is what is reported next.
        except OSError as error:  # too many open files: its end would not be noticed
            self.refusal = f"it cannot be watched: {error}"
            return
        self.pid, self.until = pid, math.inf
        self._begins(pid)
        with contextlib.suppress(OSError):
            self._connection.send(GO)

    def _known_code(self, pid: int) -> int:
        """The server, its parent, is gone as well, or does not report how the process ended."""
        code = None if self._pidfd < 0 else exit_code(pid, self._pidfd)
        if code is None:
            code = self._last_word
        return NOT_KNOWN if code is None else code

    def abandon(self) -> None:
        """The process is not to begin. Wakes who waits for it in another thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.close()

    def _let_go(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def close(self) -> None:
        """Kills the process if it still runs."""
        self._let_go()
        self._connection.close()
        for descriptor in (self._lifeline, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline = self._pidfd = -1


def readable(sources: Sequence[int], timeout_s: float) -> bool:
    """Waits until one of these descriptors can be read, for so many seconds at most (`math.inf`: for ever)."""
    poller = select.poll()
    for source in sources:
        poller.register(source, select.POLLIN)
    return bool(poller.poll(None if timeout_s == math.inf else max(0.0, timeout_s * 1000)))


def ignored_signals() -> list[int]:
    """Those that a child of this process would ignore, until it says otherwise."""
    return [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]


def place() -> list[str]:
    """What a process has from who starts it, and a fork from its server: user, namespaces (the network's, say), root
    folder, and control group. One of another place has to be started there."""
    names = sorted(os.listdir("/proc/self/ns"))
    links = [os.readlink(f"/proc/self/{name}") for name in ("root", *(f"ns/{name}" for name in names))]
    with open("/proc/self/cgroup", encoding="utf-8") as groups:
        user = (*os.getresuid(), *os.getresgid(), *sorted(os.getgroups()))
        return [*map(str, user), *links, without_own_group(groups.read())]


def umask() -> int:
    """Read, not set and set back: another thread may be making a file."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return int(next(line.split()[1] for line in status if line.startswith("Umask:")), 8)


def described(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: str | None,
    *,
    session: bool,
    ignored: Sequence[int],
) -> bytes:
    """What a new process would have from who starts it."""
    content = {
        "argv": list(command),
        "environment": dict(environment),
        "cwd": os.path.abspath(cwd or "."),
        "session": session,
        "ignored": list(ignored),
        "umask": umask(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "place": place(),
    }
    return json.dumps(content).encode()
