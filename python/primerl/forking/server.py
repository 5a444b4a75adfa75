"""A fork server: imports once, then forks a process for each request (the protocol is in `request`). Linux only.

Run as `python -m primerl.forking.server KIND OWNER LIFELINE`, with its listening socket as standard input. LIFELINE is
the descriptor of a pipe whose other end the owner holds, so that the server ends when the owner dies.

The server has one thread and computes nothing, so that a fork of it is as good as new. What it cannot make good in a
fork, it refuses: variables of the environment that libraries have read while they were imported, above all. Which these
are is recorded during the imports; those that are read in C are known by their names.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primerl.forking import child
from primerl.forking.lifeline import die_with_lifeline
from primerl.forking.preload import TORCH, preload
from primerl.forking.request import LARGEST_PACKET, place

# A process that the owner forked may hold the lifeline open, so its process id is watched as well.
OWNER_CHECK_S = 1.0
SHORT_S = 0.05
# Read in C, or by the interpreter before any module.
READ_AT_START = (
    "GLIBC_",
    "GOMP_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "SSL_CERT_",
    "TORCH",
)
# No library needs it that is loaded where torch is not.
OF_TORCH = ("GOMP_", "KMP_", "MKL_", "OMP_", "PYTORCH_", "TORCH")
# What torch's launcher gives its ranks, which is read when they meet.
NOT_AT_START = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_GLOO_")
# Said of the terminal, or of the folder, which a fork has from its request.
IRRELEVANT = {"PWD", "OLDPWD", "_", "SHLVL", "COLUMNS", "LINES"}
# The server's own: a request that does not set them has the same.
DEFAULTS = ("OMP_WAIT_POLICY",)


class Server:
    def __init__(self, kind: str, listener: socket.socket, owner: int) -> None:
        self.kind = kind
        self.listener = listener
        self.owner = owner
        self.place = place()
        self.variables = dict(os.environ)
        self.variables_now = self.variables
        """With what the imports have set."""
        self.read: set[str] = set()
        self.selector = selectors.DefaultSelector()
        self.waiting: set[socket.socket] = set()  # connections without a request as yet
        self.running: dict[io.FileIO, tuple[int, socket.socket]] = {}  # by pidfd: process and its requester

    def imports(self) -> None:
        gc.disable()
        with recorded() as self.read:
            preload(self.kind)
        self.variables_now = dict(os.environ)
        gc.freeze()

    def serve(self) -> child.Request | None:
        """Returns the request in the process that is forked for it, and None in the server when its owner is gone."""
        self.selector.register(self.listener, selectors.EVENT_READ)
        while os.getppid() == self.owner:
            for key, _ in self.selector.select(OWNER_CHECK_S):
                source = key.fileobj
                if source is self.listener:
                    self.accept()
                elif isinstance(source, io.FileIO):
                    self.reap(source)
                elif isinstance(source, socket.socket) and (request := self.answer(source)) is not None:
                    return request
        return None

    def accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:  # too many open files, for example: the requester waits
            time.sleep(SHORT_S)
            return
        with contextlib.suppress(OSError):
            connection.sendall(b'{"ready": true}')
        self.selector.register(connection, selectors.EVENT_READ)
        self.waiting.add(connection)

    def answer(self, connection: socket.socket) -> child.Request | None:
        self.selector.unregister(connection)
        self.waiting.remove(connection)
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, LARGEST_PACKET, 4)
            content = json.loads(data)
        except (OSError, ValueError):
            connection.close()  # the requester has disconnected
            return None
        try:
            reason = self.refusal(content) if len(descriptors) == 4 else "its open files were not sent"
            if reason is None:
                return self.fork(connection, content, descriptors)
            refuse(connection, reason)
        finally:
            # A process has made them its own, or has been refused.
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        return None

    def fork(self, connection: socket.socket, content: dict[str, Any], descriptors: list[int]) -> child.Request | None:
        try:
            # The room that the process's own descriptor will need: once it has begun, it cannot be refused.
            room = os.open(os.devnull, os.O_RDONLY)
            try:
                pid = os.fork()
            finally:
                os.close(room)
        except OSError as error:  # too many processes, or open files
            refuse(connection, str(error))
            return None
        if pid == 0:
            # By their objects: those that are collected later would close whatever has their number by then.
            closers = [self.selector.close, self.listener.close, *(end.close for end in self.waiting)]
            for pidfd, (_, end) in self.running.items():
                closers += [pidfd.close, end.close]
            for close in closers:
                close()
            request = child.Request(content, connection, self.variables)
            request.take(descriptors)
            return request
        pidfd = io.FileIO(os.pidfd_open(pid))
        self.running[pidfd] = pid, connection
        self.selector.register(pidfd, selectors.EVENT_READ)
        return None

    def reap(self, pidfd: io.FileIO) -> None:
        self.selector.unregister(pidfd)
        pid, connection = self.running.pop(pidfd)
        pidfd.close()
        _, status, used = os.wait4(pid, 0)
        with contextlib.suppress(OSError), connection:  # the requester is gone
            connection.sendall(json.dumps({"status": status, "cpu_s": used.ru_utime + used.ru_stime}).encode())

    def refusal(self, content: dict[str, Any]) -> str | None:
        """Why a fork would not be what a new process is."""
        if content["argv"][:1] != [sys.executable] or content["argv"][1:2] not in (["-m"], ["-c"]):
            return f"it is no program of {sys.executable}"
        wanted = content["environment"]
        if content["place"] != self.place:
            return "who asks has another user, namespace, root folder or control group"
        known = (self.variables, self.variables_now)
        changed = {
            name
            for name in {*wanted, *self.variables}
            if wanted.get(name) not in [variables.get(name) for variables in known]
        }
        late = sorted(name for name in changed if self.is_read(name, wanted))
        return f"{', '.join(late)} had been read before" if late else None

    def is_read(self, name: str, wanted: dict[str, str]) -> bool:
        if (
            name in IRRELEVANT
            or (name in DEFAULTS and name not in wanted)
            or name.startswith(NOT_AT_START)
            or child.can_set(name, wanted.get(name), self.variables.get(name))
        ):
            return False
        if self.kind != TORCH and name.startswith(OF_TORCH):
            return False
        return name in self.read or name.startswith(READ_AT_START)


def refuse(connection: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError), connection:
        connection.sendall(json.dumps({"refused": reason}).encode())


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of variables that are looked up within the block, not those of a copy that is made of all."""
    names: set[str] = set()
    kind = type(os.environ)
    look_up, iterate = kind.__getitem__, kind.__iter__
    copied: deque[str] = deque()  # as they come of an iteration, and are looked up in turn

    def noting(environ: os._Environ[str], name: str) -> str:
        if copied and copied[0] == name:
            copied.popleft()
        else:
            copied.clear()
            names.add(name)
        return look_up(environ, name)

    def copying(environ: os._Environ[str]) -> Iterator[str]:
        for name in iterate(environ):
            copied.append(name)
            yield name

    kind.__getitem__, kind.__iter__ = noting, copying  # type: ignore[method-assign]
    try:
        yield names
    finally:
        kind.__getitem__, kind.__iter__ = look_up, iterate  # type: ignore[method-assign]


def main(arguments: list[str]) -> None:
    kind, owner, lifeline = arguments[0], int(arguments[1]), int(arguments[2])
    os.set_inheritable(lifeline, False)
    listener = socket.socket(fileno=os.dup(0))
    folder = Path(listener.getsockname()).parent
    signal.signal(signal.SIGTERM, lambda *_: leave(folder))
    die_with_lifeline(lifeline, signal.SIGTERM)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    server = Server(kind, listener, owner)
    server.imports()
    request = server.serve()
    if request is not None:
        os.close(lifeline)
        del server
        child.become(request)
    leave(folder)


def leave(folder: Path) -> None:
    """Removes what the owner, which is gone, cannot remove any more."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
