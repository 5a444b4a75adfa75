"""The parent of every process of a run: a small process of its own, so that nothing outlives the run.

Run as `python -I -S guard.py`, with a socket to its owner (launcher or training script) as standard input; the standard
library is all it may use. The protocol is one JSON object a line:

    owner -> guard   {"start": name, "command": [..], "environment": {..}, "log": path, "hide": [..], "fork": path}
                     hide: texts that are removed from the log, the longest first
                     fork: the socket of a fork server, which may be its parent in place of the guard
                     {"stop": grace seconds, "names": [..]}   SIGTERM, then SIGKILL to what is left; all when no names
                     {"signal": number, "name": name}         to the process group of that name, if it runs
                     {"ping": true}
    guard -> owner   {"started": name, "pid": int}
                     {"exited": name, "code": int, "cpu_s": float}
                     code < 0: the signal's number, or NOT_KNOWN of a process whose fork server was gone
                     {"failed": name, "reason": str}   it could not be started
                     {"stopped": true}   nothing of the run is left (only after a stop without names)
                     {"pong": true}

What can die, and who cleans up:
- a process: the guard kills the rest of its process group, and reports;
- the owner, even by SIGKILL: its end of the socket closes, and the guard stops everything;
- the guard, even by SIGKILL: the kernel kills its children (PR_SET_PDEATHSIG), and the owner kills their groups;
- the guard hangs (SIGSTOP): its pongs stay away, and the owner kills it;
- both at once: a second process that only waits ends the rest (`guard_watch`).
Descendants that left their group end with their process (`trees`): SIGTERM, then SIGKILL. The guard has no threads:
the kernel ties the death signal to the *thread* that forked, so that threads of the owner's program may come and go.

A process that a fork server makes is that server's child, not the guard's: its lifeline kills it when the guard dies,
and the server reports how it ended (`guarded_forks`, `primerl.forking.request`). A server that refuses, is gone or
takes too long costs time only: the process is then started the plain way.

Output in which something is to be hidden goes through a writer (`hiding`).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

if __name__ == "__main__":
    # Last, so that no module of ours stands in for one of Python's. Of the package, the guard imports what needs the
    # standard library only.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
from primerl.forking.request import Forked
from primerl.launch.supervise import guard_watch, trees
from primerl.launch.supervise.guarded_forks import Asked, Forks
from primerl.launch.supervise.log_filter import with_writer
from primerl.launch.supervise.plain_start import become
from primerl.launch.supervise.trees import MARK, PART, Groups, Tree, kill_marked

# After the owner's death no one waits for an orderly end.
ORPHAN_GRACE_S = 2.0
# A process the owner forked may hold the socket open after the owner's death, so its process id is watched as well.
OWNER_CHECK_S = 1.0
# How long an end is reported late because its log is still being written: the owner quotes the log, but a stray may
# hold the pipe.
LAST_WORDS_S = 1.0
# What a process that has ended leaves behind may come to an end by itself.
STRAY_GRACE_S = 5.0


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # Gone already; or only a zombie is left, which macOS reports as a permission error.
        return


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
        # By writer: when the end of the process is reported to the owner at the latest, and the report.
        self.untold: dict[int, tuple[float, dict[str, Any]]] = {}
        self.stopping = False
        self.selector = selectors.DefaultSelector()
        self.forks = Forks(self.selector, begun=self.begun, start_plain=self.start_plain, ended=self.ended)
        self.groups = Groups(mark)
        self.started = 0
        self.trees: dict[int, Tree] = {}  # of those that run
        self.strays: dict[Tree, float] = {}  # of those that have ended, and when what is left of them is killed
        self.watcher = 0

    def run(self) -> int:
        self.watcher = guard_watch.begin(self.owner, self.mark)
        trees.adopt_orphans()
        readable, wakeup = socket.socketpair()
        readable.setblocking(False)
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # The owner decides: it gets these signals itself, or it dies and the socket closes.
            signal.signal(number, signal.SIG_IGN)
        with self.selector as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(readable, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(max(0.0, min(OWNER_CHECK_S, self.due() - time.monotonic()))):
                    if key.fileobj is readable:
                        readable.recv(4096)
                    elif isinstance(key.data, Forked):
                        self.forks.look(key.data)
                    elif not self.receive():
                        self.orphaned()
                if self.owner_alive and os.getppid() != self.owner:
                    self.orphaned()
                self.reap()
                self.kill_overdue()
                self.tell_overdue()
                self.forks.look_at_overdue()
                self.kill_strays()
                if self.stopping and not self.running:
                    self.kill_rest()
                    self.reap_writers()
                    self.send({"stopped": True})
                    # A child may end after the socket is closed.
                    signal.set_wakeup_fd(-1)
                    return 0

    def due(self) -> float:
        """When there is something to do at the latest."""
        untold = (at for at, _ in self.untold.values())
        return min([*self.kill_at.values(), *self.strays.values(), *untold, self.forks.due()])

    def orphaned(self) -> None:
        self.selector.unregister(self.connection)
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
                    request.get("fork"),
                )
            elif "ping" in request:
                self.send({"pong": True})
            elif "signal" in request:
                for pid in [pid for pid, name in self.running.items() if name == request["name"]]:
                    signal_group(pid, request["signal"])
            else:
                self.stop(request["stop"], request.get("names", []))
        return bool(data)

    def start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: str,
        hide: list[bytes],
        server: str | None,
    ) -> None:
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
        self.started += 1
        tree = Tree(self.groups, self.started)
        asked = Asked(name, command, {**environment, MARK: self.mark, PART: tree.mark}, output, writer, tree)
        if server is None or not self.forks.ask(server, asked):
            self.start_plain(asked)

    def start_plain(self, asked: Asked) -> None:
        read_end, write_end = os.pipe()  # closed by a successful exec, else carries the reason
        guard_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            asked.tree.take(0)
            become(asked.command, asked.environment, asked.output, write_end, guard_pid)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            reason = pipe.read().decode(errors="replace")
        if reason:
            os.waitpid(pid, 0)
            asked.close(self.writers, pid)
            self.send({"failed": asked.name, "reason": reason})
            return
        self.begun(asked, pid)

    def begun(self, asked: Asked, pid: int) -> None:
        asked.close(self.writers, pid)
        self.running[pid] = asked.name
        self.trees[pid] = asked.tree
        self.send({"started": asked.name, "pid": pid})

    def stop(self, grace_s: float, names: list[str]) -> None:
        self.stopping = self.stopping or not names
        deadline = time.monotonic() + grace_s
        for asked in self.forks.withdraw(names):
            asked.close(self.writers, 0)
            self.send({"exited": asked.name, "code": -signal.SIGTERM, "cpu_s": 0.0})
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

    def kill_strays(self) -> None:
        now = time.monotonic()
        for tree in [tree for tree, until in self.strays.items() if now >= until]:
            del self.strays[tree]
            tree.kill()

    def kill_rest(self) -> None:
        """Whatever is left when no process runs any more."""
        self.groups.kill()
        kill_marked(self.mark)
        own = {self.watcher, *self.writers}
        trees.kill_all(lambda: set(trees.children()) - own)
        if self.watcher:
            trees.send(self.watcher, signal.SIGKILL)

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
            self.ended(pid, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)

    def ended(self, pid: int, code: int, cpu_s: float) -> None:
        name = self.running.pop(pid, None)
        self.kill_at.pop(pid, None)
        if name is None:
            return
        signal_group(pid, signal.SIGKILL)  # what it left behind in its group
        tree = self.trees.pop(pid)
        if tree.terminate():
            self.strays[tree] = time.monotonic() + STRAY_GRACE_S
        end = {"exited": name, "code": code, "cpu_s": cpu_s}
        writer = next((writer for writer, of in self.writers.items() if of == pid), None)
        if writer is None:
            self.send(end)
        else:
            self.untold[writer] = time.monotonic() + LAST_WORDS_S, end

    def reap_writers(self) -> None:
        """When no process is left that could write to them."""
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


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(0)) as owner:
        sys.exit(Guard(owner, sys.argv[1]).run())
