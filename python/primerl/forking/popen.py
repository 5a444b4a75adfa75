"""`subprocess.Popen` for a process that a fork server makes, where one can; else a plain one."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from primerl.forking.request import Forked, ignored_signals, readable

# Tests put another in its place.
PlainPopen = subprocess.Popen


class ForkedPopen(subprocess.Popen[Any]):
    """For commands of the server's interpreter, `[sys.executable, "-m" or "-c", ...]`.

    `address`: of the server. The constructor waits for a server that still imports, unless `at_once`: then the
    first call that asks for the process (`communicate`, `wait`, `poll`, `pid`) does; until then it has not begun.

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
        """Why it was started the plain way, if the server gave a reason."""
        self.timed_out = False
        """Whether it was started the plain way since the server did not answer in time."""
        self._ends: list[int] = []
        self._lock = threading.Lock()
        super().__init__(args, env=dict(os.environ if env is None else env), **options)
        if not at_once:
            self._begin(math.inf)

    @property
    def pid(self) -> int:
        """Waits until the process has begun."""
        self._begin(math.inf)
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
        try:
            self._plain = PlainPopen(self.args, stdin=stdin, stdout=stdout, stderr=stderr, **self._options)
        except BaseException:
            self.returncode = 127  # or the cleanup would wait for it
            self._begun(None)
            raise
        self._begun(self._plain.pid)

    def _begun(self, pid: int | None) -> None:
        self._begun_pid = pid
        while self._ends:
            os.close(self._ends.pop())

    def _begin(self, deadline: float) -> bool:
        """Waits until it has begun, or ended; False when the time is up."""
        return self._wait_until(lambda: self._begun_pid is not None, deadline)

    def _wait_until(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Waits until it is done, or the fork has ended; False when the time is up."""
        while True:
            sources, until = self._look()
            if is_done() or self.returncode is not None:
                return True
            now = time.monotonic()
            if now >= deadline:
                return False
            readable(sources, min(deadline, until) - now)

    def _look(self) -> tuple[list[int], float]:
        """Takes note of what is known of the fork. What to wait for until there is more: descriptors, and a time."""
        with self._lock:
            forked = self._forked
            if forked is None or self.returncode is not None:
                return [], math.inf
            forked.look()
            if forked.refusal is not None:
                self.refusal, self.timed_out = forked.refusal, forked.timed_out
                self._start_plain()
            elif forked.pid is not None and self._begun_pid is None:
                self._begun(forked.pid)
            if forked.code is not None:
                forked.close()
                self.returncode = forked.code
            return forked.sources(), forked.until

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        deadline = _deadline(timeout)
        if not self._begin(deadline):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return super().communicate(input, _left(deadline))

    def send_signal(self, sig: int) -> None:
        with self._lock:
            if self._begun_pid is None and self.returncode is None and self._forked is not None:
                self._forked.abandon()
                self.returncode = -signal.SIGKILL
                self._begun(None)
                return
        super().send_signal(sig)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self._look()
            if self._plain is not None:
                self.returncode = self._plain.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        deadline = _deadline(timeout)
        if self._begin(deadline) and self._plain is not None:
            self.returncode = self._plain.wait(_left(deadline))
        elif not self._wait_until(lambda: False, deadline):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _left(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _copy(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError:  # a standard stream that is closed
        return os.open(os.devnull, os.O_RDWR)
