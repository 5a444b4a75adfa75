"""The owner's half of the guard: start processes by name, hear how they end, stop them all."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from primerl.launch.placement.protocol import Process
from primerl.launch.supervise import guard, trees

# Added to the grace period: the guard answers within this, or it is not well.
GUARD_ANSWER_S = 5.0
PING_EVERY_S = 2.0
# A guard that leaves a ping unanswered for this long hangs, and deaths would go unseen.
GUARD_SILENT_S = 15.0


class Processes:
    """All processes of one run, under one guard. Use as a context manager: leaving it leaves no process behind."""

    def __init__(self, by_name: dict[str, Process] | None = None) -> None:
        """`by_name`: where the newest process of each name is noted."""
        self.mark = uuid.uuid4().hex
        self.by_name = {} if by_name is None else by_name
        self.guard_end: str | None = None
        """How the guard ended, if it did."""
        self.guard_heard = time.monotonic()
        self._pinged: float | None = None  # when, while unanswered
        self._stopped = False
        self._received = b""
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = ours
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, self.mark],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is for the owner alone
            )

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    def fileno(self) -> int:
        """Readable when `poll` has something to read, for callers that wait for other things too."""
        return self._connection.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(grace_s=0.0 if kind is not None else GUARD_ANSWER_S)
        self.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        hide: Sequence[str] = (),
        fork: str | None = None,
    ) -> Process:
        """Starts a command in a session of its own, its output appended to `log`, without the texts to `hide`; by the
        fork server that listens at `fork`, where that can."""
        log.parent.mkdir(parents=True, exist_ok=True)
        process = self.by_name[name] = Process.begun(name, log)
        self._send(
            {
                "start": name,
                "command": list(command),
                "environment": dict(environment),
                "log": os.fspath(log.absolute()),
                "hide": list(hide),
                "fork": fork,
            }
        )
        return process

    def poll(self, timeout_s: float) -> list[Process]:
        """Waits up to that long for news; returns the processes that have ended since the last call."""
        ended: list[Process] = []
        if self.guard_end is not None:
            return ended
        if self._readable(timeout_s):
            try:
                data = self._connection.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._lose_guard("was killed")
                return ended
            self.guard_heard, self._pinged = time.monotonic(), None
            self._received += data
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                process = self._note(json.loads(line))
                if process is not None:
                    ended.append(process)
        else:
            self._look_after_guard()
        return ended

    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None:
        """SIGTERM to all (or the named ones), SIGKILL after the grace period; returns when they have ended."""
        if self._stopped:
            return
        self._send({"stop": grace_s, "names": list(names)})
        deadline = time.monotonic() + grace_s + GUARD_ANSWER_S
        while self.guard_end is None and time.monotonic() < deadline:
            if self._stopped or (names and all(self.by_name[name].ended for name in names)):
                return
            self.poll(max(0.0, deadline - time.monotonic()))
        if self.guard_end is None and not names:
            self._guard.kill()
            self._lose_guard("did not stop the processes in time")

    def signal(self, name: str, number: int) -> None:
        """To the process group of that name, if it runs."""
        self._send({"signal": number, "name": name})

    def kill(self) -> None:
        """Ends everything at once."""
        self.stop(grace_s=0.0)

    def close(self) -> None:
        self._connection.close()
        if self._guard.poll() is None and not self._stopped:
            self._guard.kill()
        self._guard.wait()

    def _readable(self, timeout_s: float) -> bool:
        # select() would refuse a descriptor above 1023 in a program that has many open.
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def _note(self, message: dict[str, Any]) -> Process | None:
        if "pong" in message:
            return None
        if "stopped" in message:
            self._stopped = True
            return None
        name = message.get("started") or message.get("exited") or message["failed"]
        process = self.by_name[name]
        if "started" in message:
            process.pid = message["pid"]
            return None
        if "exited" in message:
            process.code, process.cpu_s = message["code"], message["cpu_s"]
        else:
            process.failure = message["reason"]
        return process

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._lose_guard("was killed")

    def _look_after_guard(self) -> None:
        now = time.monotonic()
        if self._pinged is not None:
            if now - self._pinged > GUARD_SILENT_S:
                self._guard.kill()
                self._lose_guard(f"did not answer for {now - self._pinged:.0f} s")
        elif now - self.guard_heard > PING_EVERY_S:
            self._pinged = now
            self._send({"ping": True})

    def _lose_guard(self, how: str) -> None:
        """The guard is dead. The kernel has killed its children; their groups and strays are ours to end."""
        self.guard_end = how
        for process in self.by_name.values():
            if process.pid is not None and not process.ended:
                guard.signal_group(process.pid, signal.SIGKILL)
                process.code = -signal.SIGKILL
        trees.kill_run(self.mark)
