"""`subprocess.Popen` for a process that a fork server makes, where one can; else a plain one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from primerl.forking.request import TOLD_S, Forked, ignored_signals

# As the guard's.
FORK_WAIT_S = 30.0
# Tests put another in its place.
PlainPopen = subprocess.Popen


class ForkedPopen(subprocess.Popen[Any]):
    """For commands of the server's interpreter, `[sys.executable, "-m" or "-c", ...]`.

    `address`: of the server. The constructor waits for a server that still imports, unless `at_once`: then whoever asks
    for the process (`communicate`, `wait`, `poll`, `pid`) does, and until then it has not begun.

    Overrides those methods of `Popen` (Python 3.11 to 3.14) that start a child of this process and wait for it, as this
    process is no child of it. Options that a fork cannot have raise ValueError.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        address: str,
        env: Mapping[str, str] | None = None,
        at_once: bool = False,
        **options: Any,
    ) -> None:
        self._address = address
        self._forked: Forked | None = None  # until the plain way is taken
        self._plain: subprocess.Popen[Any] | None = None
        self._begun_pid: int | None = None
        self.refusal: str | None = None
        """Why it was started the plain way, where the server said so."""
        self.timed_out = False
        """Whether it was started the plain way since the server did not answer in time."""
        self._until = time.monotonic() + FORK_WAIT_S
        self._told_until: float | None = None  # once the process has gone
        self._ends: list[int] = []
        self._messages = threading.Lock()
        super().__init__(args, env=dict(os.environ if env is None else env), **options)
        if not at_once:
            self._begin(None)

    @property
    def pid(self) -> int:
        """Waits until the process has begun."""
        self._begin(None)
        if self._begun_pid is None:
            raise ProcessLookupError("it was ended before it had begun")
        return self._begun_pid

    @pid.setter
    def pid(self, value: int) -> None:
        self._begun_pid = value

    @property
    def cpu_s(self) -> float:
        """CPU seconds of a fork that has ended."""
        return 0.0 if self._forked is None else self._forked.cpu_s

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell = rest[:7]
        pipes, (gid, gids, uid, mask, session, group) = rest[7:13], rest[14:20]
        numbers = (gid, gids, uid) != (None, None, None) or mask != -1 or group != -1
        if preexec_fn is not None or pass_fds or executable is not None or shell or numbers:
            raise ValueError("an option is not for forks of a server")
        self._options = {"env": env, "cwd": cwd, "start_new_session": session}
        # Kept until it has begun: the plain way may need them.
        for own, end in enumerate((pipes[0], pipes[3], pipes[5])):
            self._ends.append(_copy(end if end != -1 else own))
        first, second, third = self._ends
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True
        command = [os.fspath(each) for each in args]
        try:
            self._forked = Forked(
                self._address,
                command,
                env,
                (first, second, third),
                cwd=cwd,
                session=session,
                ignored=ignored_signals(),
            )
        except OSError:
            self._start_plain()

    def _start_plain(self) -> None:
        if self._forked is not None:
            self._forked.close()
            self._forked = None
        stdin, stdout, stderr = self._ends
        self._plain = PlainPopen(self.args, stdin=stdin, stdout=stdout, stderr=stderr, **self._options)
        self._begun(self._plain.pid)

    def _begun(self, pid: int | None) -> None:
        self._begun_pid = pid
        while self._ends:
            os.close(self._ends.pop())

    def _begin(self, timeout_s: float | None) -> bool:
        """Waits until it has begun, or ended; False when the time is up."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._begun_pid is None and self.returncode is None:
            now = time.monotonic()
            if end is not None and now >= end and timeout_s != 0:
                return False
            self._hear(max(0.0, min(self._until, self._until if end is None else end) - now))
            if timeout_s == 0:
                break
        return self._begun_pid is not None or self.returncode is not None

    def _hear(self, timeout_s: float | None) -> None:
        """Waits that long for a message, and takes those that are there."""
        forked = self._forked
        if forked is None:
            return
        self._await(forked, timeout_s)
        with self._messages:
            while self._forked is not None and self.returncode is None and _readable(forked, 0.0):
                forked.receive()
                if forked.refusal is not None:
                    self.refusal = forked.refusal
                    self._start_plain()
                elif self._begun_pid is None and forked.pid is not None:
                    self._begun(forked.pid)
                elif forked.code is not None:
                    self._has_ended(forked.code)
            now = time.monotonic()
            if self.returncode is not None:
                return
            if self._begun_pid is None and now >= self._until:
                self.timed_out = True
                self._start_plain()
            elif self._told_until is not None and now >= self._told_until:
                forked.has_gone()
                self._has_ended(forked.code or 0)

    def _await(self, forked: Forked, timeout_s: float | None) -> None:
        """Waits for a message; once the process has gone, not for long."""
        if forked.connection.fileno() < 0:  # abandoned in another thread
            return
        if self._told_until is None and forked.pidfd >= 0:
            poller = select.poll()
            poller.register(forked.connection, select.POLLIN)
            poller.register(forked.pidfd, select.POLLIN)
            if not any(descriptor == forked.pidfd for descriptor, _ in poller.poll(_ms(timeout_s))):
                return
            self._told_until = time.monotonic() + TOLD_S
        if self._told_until is not None:
            left = max(0.0, self._told_until - time.monotonic())
            timeout_s = left if timeout_s is None else min(timeout_s, left)
        _readable(forked, timeout_s)

    def _has_ended(self, code: int) -> None:
        if self._forked is not None:
            self._forked.close()
        self.returncode = code

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        before = time.monotonic()
        if not self._begin(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return super().communicate(input, None if timeout is None else max(0.0, timeout - time.monotonic() + before))

    def send_signal(self, sig: int) -> None:
        with self._messages:
            if self._begun_pid is None and self.returncode is None and self._forked is not None:
                self._forked.abandon()
                self.returncode = -signal.SIGKILL
                self._begun(None)
                return
        super().send_signal(sig)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            if self._plain is not None:
                self.returncode = self._plain.poll()
            else:
                self._hear(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if self._plain is not None:
                self.returncode = self._plain.wait(left)
            elif self._begin(left):
                self._hear(left)
            if self.returncode is None and end is not None and time.monotonic() >= end:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def _copy(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError:  # a standard stream that is closed
        return os.open(os.devnull, os.O_RDWR)


def _readable(forked: Forked, timeout_s: float | None) -> bool:
    if forked.connection.fileno() < 0:  # abandoned in another thread
        return True
    poller = select.poll()
    poller.register(forked.connection, select.POLLIN)
    return bool(poller.poll(_ms(timeout_s)))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else max(0.0, seconds * 1000)
