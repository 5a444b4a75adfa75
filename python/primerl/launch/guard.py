"""The parent of every process of a run: a small process of its own, so that nothing outlives the run.

Run as `python -I -S guard.py`, with a socket to its owner (launcher or training script) as standard input; the standard
library is all it may use. The protocol is one JSON object a line:

    owner -> guard   {"start": name, "command": [..], "environment": {..}, "log": path, "hide": [..]}
                     hide: texts that are left out of the log, the longest first
                     {"stop": grace seconds, "names": [..]}   SIGTERM, then SIGKILL to what is left; all when no names
                     {"ping": true}
    guard -> owner   {"started": name, "pid": int}
                     {"exited": name, "code": int, "cpu_s": float}   code < 0: the signal's number
                     {"failed": name, "reason": str}   it could not be started
                     {"stopped": true}   nothing of the run is left (only after a stop without names)
                     {"pong": true}

What can die, and who cleans up:
- a process: the guard kills the rest of its process group, and reports;
- the owner, even by SIGKILL: its end of the socket closes, and the guard stops everything;
- the guard, even by SIGKILL: the kernel kills its children (PR_SET_PDEATHSIG), and the owner kills their groups;
- the guard hangs (SIGSTOP): its pongs stay away, and the owner kills it.
Descendants that left their group are found by a mark in their environment. The guard has no threads: the kernel ties
the death signal to the *thread* that forked, so that threads of the owner's program may come and go.

Output in which something is to be hidden goes through a pipe to a writer, a fork of the guard, which ends when all have
ended that can write to it: so nothing of it reaches the log otherwise, whoever writes it, and the last words of a
process that was killed do.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

MARK = "PRIMERL_RUN_MARK"
PR_SET_PDEATHSIG = 1
# After the owner died there is nobody to wait for an orderly end.
ORPHAN_GRACE_S = 2.0
# A process the owner forked may hold the socket open after the owner's death, so its process id is watched as well.
OWNER_CHECK_S = 1.0
# Until the owner is told of an end whose log is still being written: it quotes that, but a stray may hold the pipe.
LAST_WORDS_S = 1.0
HIDDEN = b"<secret>"
LONGEST_LINE = 1 << 16


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # Gone already; or only a zombie is left, which macOS reports as a permission error.
        return


def marked(mark: str) -> list[int]:
    """Process ids whose environment carries the mark (Linux; elsewhere process groups have to do)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    for entry in entries:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue
    return found


def kill_marked(mark: str) -> list[int]:
    """SIGKILL to everything that carries the mark, until nothing does. Returns what was killed."""
    killed: list[int] = []
    # A process may fork between the listing and its death; its child is in the next listing.
    for _ in range(50):
        found = marked(mark)
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(pid)
        time.sleep(0.02)
    return killed


class Guard:
    def __init__(self, connection: socket.socket, mark: str) -> None:
        self.connection = connection
        self.mark = mark
        self.running: dict[int, str] = {}  # pid = process group -> name
        self.received = b""
        self.owner_alive = True
        self.owner = os.getppid()
        self.kill_at: dict[int, float] = {}  # process group -> when SIGKILL follows SIGTERM
        self.writers: dict[int, int] = {}  # process that writes a log -> whose log
        # By writer: when the owner is told of the end of the process at the latest, and what.
        self.untold: dict[int, tuple[float, dict[str, Any]]] = {}
        self.stopping = False

    def run(self) -> int:
        readable, wakeup = socket.socketpair()
        readable.setblocking(False)
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # The owner decides; it is told by its own signals, or it dies and the socket says so.
            signal.signal(number, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(readable, selectors.EVENT_READ)
            while True:
                due = min([*self.kill_at.values(), *(at for at, _ in self.untold.values())], default=math.inf)
                for key, _ in selector.select(max(0.0, min(OWNER_CHECK_S, due - time.monotonic()))):
                    if key.fileobj is readable:
                        readable.recv(4096)
                    elif not self.receive():
                        self.orphaned(selector)
                if self.owner_alive and os.getppid() != self.owner:
                    self.orphaned(selector)
                self.reap()
                self.kill_overdue()
                self.tell_overdue()
                if self.stopping and not self.running:
                    kill_marked(self.mark)
                    self.reap_writers()
                    self.send({"stopped": True})
                    return 0

    def orphaned(self, selector: selectors.BaseSelector) -> None:
        selector.unregister(self.connection)
        self.owner_alive = False
        self.stop(ORPHAN_GRACE_S, [])

    def receive(self) -> bool:
        """Carries out what the owner sent. False when the owner is gone."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            return False
        self.received += data
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                self.start(
                    request["start"],
                    request["command"],
                    request["environment"],
                    request["log"],
                    [text.encode(errors="surrogateescape") for text in request.get("hide", [])],
                )
            elif "ping" in request:
                self.send({"pong": True})
            else:
                self.stop(request["stop"], request.get("names", []))
        return bool(data)

    def start(self, name: str, command: list[str], environment: dict[str, str], log: str, hide: list[bytes]) -> None:
        if self.stopping:
            self.send({"failed": name, "reason": "the run is being stopped"})
            return
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self.send({"failed": name, "reason": f"{command[0]}: {error}"})
            return
        writer = None
        if hide:
            writer, output = with_writer(output, hide)
        read_end, write_end = os.pipe()  # closed by a successful exec, else carries the reason
        guard_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            become(command, {**environment, MARK: self.mark}, output, write_end, guard_pid)
        os.close(write_end)
        os.close(output)
        if writer is not None:
            self.writers[writer] = pid
        with os.fdopen(read_end, "rb") as pipe:
            reason = pipe.read().decode(errors="replace")
        if reason:
            os.waitpid(pid, 0)
            self.send({"failed": name, "reason": reason})
            return
        self.running[pid] = name
        self.send({"started": name, "pid": pid})

    def stop(self, grace_s: float, names: list[str]) -> None:
        self.stopping = self.stopping or not names
        deadline = time.monotonic() + grace_s
        for pid, name in self.running.items():
            if not names or name in names:
                # A second, shorter stop overtakes the first.
                self.kill_at[pid] = min(deadline, self.kill_at.get(pid, deadline))
                signal_group(pid, signal.SIGTERM)

    def kill_overdue(self) -> None:
        now = time.monotonic()
        for pid, deadline in list(self.kill_at.items()):
            if now >= deadline:
                signal_group(pid, signal.SIGKILL)
                # Reaped through SIGCHLD; asked again later in case it forked just then.
                self.kill_at[pid] = now + 0.1

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.writers.pop(pid, None) is not None:
                self.tell(pid)
                continue
            name = self.running.pop(pid, None)
            self.kill_at.pop(pid, None)
            if name is None:
                continue
            signal_group(pid, signal.SIGKILL)  # what it left behind in its group
            cpu_s = usage.ru_utime + usage.ru_stime
            end = {"exited": name, "code": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s}
            writer = next((writer for writer, of in self.writers.items() if of == pid), None)
            if writer is None:
                self.send(end)
            else:
                self.untold[writer] = time.monotonic() + LAST_WORDS_S, end

    def reap_writers(self) -> None:
        """When nobody is left who could write to them."""
        deadline = time.monotonic() + LAST_WORDS_S
        self.reap()
        while self.writers and time.monotonic() < deadline:
            time.sleep(0.01)
            self.reap()
        for writer in list(self.untold):
            self.tell(writer)

    def tell_overdue(self) -> None:
        now = time.monotonic()
        for writer, (deadline, _) in list(self.untold.items()):
            if now >= deadline:
                self.tell(writer)

    def tell(self, writer: int) -> None:
        """The owner, of the end of the process whose log it writes, where that has ended."""
        _, end = self.untold.pop(writer, (0.0, None))
        if end is not None:
            self.send(end)

    def send(self, message: dict[str, Any]) -> None:
        if not self.owner_alive:
            return
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            # The owner has just died; the selector says so next.
            return


def with_writer(log: int, hide: list[bytes]) -> tuple[int, int]:
    """Forks a writer of that log. Returns its process id, and what to write to in place of the log."""
    source, output = os.pipe()
    pid = os.fork()
    if pid != 0:
        os.close(source)
        os.close(log)
        return pid, output
    try:
        os.dup2(source, 0)
        os.dup2(log, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # The guard's socket among them: its owner has to see it close.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        write_without(hide)
    finally:
        os._exit(0)


def write_without(hide: list[bytes]) -> None:
    """Standard input to standard output, by lines, as what is hidden may come in pieces."""
    longest, kept = max(map(len, hide)), b""
    while data := os.read(0, 1 << 16):
        kept += data
        whole = max(kept.rfind(b"\n"), kept.rfind(b"\r")) + 1
        if not whole and len(kept) > LONGEST_LINE:
            kept = hidden(kept, hide)
            whole = max(0, len(kept) - longest + 1)
        write_all(hidden(kept[:whole], hide))
        kept = kept[whole:]
    write_all(hidden(kept, hide))


def hidden(text: bytes, hide: list[bytes]) -> bytes:
    for one in hide:
        text = text.replace(one, HIDDEN)
    return text


def write_all(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return  # a full disk: who writes is not held up by it


def become(command: list[str], environment: dict[str, str], output: int, report: int, guard_pid: int) -> None:
    """In the forked child: turns into the command. Never returns."""
    try:
        os.setsid()
        die_with_parent(guard_pid)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.set_inheritable(report, False)
        os.execvpe(command[0], command, environment)
    except BaseException as error:  # noqa: BLE001 - the parent is told, and the child must not go on as a second guard
        os.write(report, f"{command[0]}: {error}".encode())
    finally:
        os._exit(127)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel sends the signal to this process when its parent dies (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise RuntimeError("the parent died before its child had started")


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(0)) as owner:
        sys.exit(Guard(owner, sys.argv[1]).run())
