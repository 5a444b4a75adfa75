"""Asks a fork server for a process, and learns how it ends. Standard library only.

One connection a process (a Unix socket that keeps packets apart), one JSON object a packet:

    server -> requester    {"ready": true}             once it has imported
    requester -> server    what `described` says, with four descriptors: standard input, output and
                           error, and the reading end of the lifeline
    server -> requester    {"refused": why}            start it the plain way
    process -> requester   {"pid": process id}         it is all that it will be, and waits
    requester -> process   go
    process -> requester   {"exit": code, "cpu_s"}     its last act, where it ends in order
    server -> requester    {"status": as of wait(), "cpu_s"}

A server that hangs has got no descriptor: it would keep a pipe open whose end others wait for.

The lifeline is a pipe that nobody writes to: the kernel kills the process when the requester closes its end, or dies.
It stands for PR_SET_PDEATHSIG, as the process is the server's child and has to outlive the server. A server that is
killed takes nothing with it: the processes hold the other end of their connections, which close when they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from primerl.launch.trees import without_own_group

# From the end of a process until its server has told how it ended; a server that hangs tells nothing.
TOLD_S = 2.0
# A packet that is larger than the kernel's buffer is refused by it; the process then starts the plain way.
LARGEST_PACKET = 1 << 20
GO = b"go"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


class Forked:
    """A process that was asked for: `receive` whatever can be read from `connection`.

    `refusal` is set where the requester has to start it itself, `pid` once it has begun, `code` (below 0: the signal's
    number) and `cpu_s` once it has ended.
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
        self.pidfd = -1
        """Readable once the process has ended, whatever the server does. -1 before it has begun."""
        self._last_word: int | None = None
        self._lifeline = -1
        self._request = described(command, environment, cwd, session=session, ignored=ignored)
        self._descriptors: list[int] = []
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A server that accepts nothing may not hold up the requester.
            self.connection.setblocking(False)
            self.connection.connect(address)
            self.connection.setblocking(True)
            for descriptor in descriptors:
                self._descriptors.append(os.dup(descriptor))
        except BaseException:
            self.close()
            raise

    def receive(self) -> None:
        """Takes one message; waits where there is none."""
        try:
            data = self.connection.recv(LARGEST_PACKET)
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        message = json.loads(data)
        if "ready" in message:
            self._ask()
        elif "refused" in message:
            self.refusal = message["refused"]
        elif "pid" in message:
            self.pid = message["pid"]
            try:
                self.pidfd = os.pidfd_open(message["pid"])
                self._begins(message["pid"])
                self.connection.send(GO)
            except OSError:
                return  # It has just died, which is what comes next.
        elif "exit" in message:
            self._last_word, self.cpu_s = message["exit"], message["cpu_s"]
        elif self.pid is None:
            self.refusal = f"it ended before it had begun (status {message['status']})"
        else:
            self.code, self.cpu_s = os.waitstatus_to_exitcode(message["status"]), message["cpu_s"]

    def abandon(self) -> None:
        """The process is not to begin. Wakes who waits for it in another thread."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close()

    def _ask(self) -> None:
        lifeline, self._lifeline = os.pipe()
        try:
            socket.send_fds(self.connection, [self._request], [*self._descriptors, lifeline])
        except OSError as error:  # a request that is too large, say
            self.refusal = f"the fork server cannot be asked: {error}"
        finally:
            os.close(lifeline)
            self._let_go()

    def _let_go(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def close(self) -> None:
        """Kills the process if it still runs."""
        self._let_go()
        self.connection.close()
        for descriptor in (self._lifeline, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline = self.pidfd = -1

    def _lost(self) -> None:
        """Nobody holds the other end any more: neither the server nor the process."""
        if self.pid is None:
            self.refusal = "the fork server has ended"
        else:
            self.has_gone()

    def has_gone(self) -> None:
        """The process has ended, and the server, its parent, is gone as well or does not say how: only it could have
        known which signal it was."""
        self.code = -signal.SIGKILL if self._last_word is None else self._last_word


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
