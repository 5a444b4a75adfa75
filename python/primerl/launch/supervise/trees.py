"""Everything that a process of a run has started, whatever session it is in. Standard library only: the guard uses it.

Three ways to find it, each of which finds what the others lose:
- a control group for each process (cgroup v2, where this user can write there), which nothing leaves by itself;
- marks in the environment, of the run and of the process, which children have too unless it is taken from them;
- the guard is who adopts orphans (PR_SET_CHILD_SUBREAPER), so at the end of the run its children are all that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable

MARK = "PRIMERL_RUN_MARK"
PART = "PRIMERL_PROCESS_MARK"
PR_SET_CHILD_SUBREAPER = 36
# A process may fork between the listing and its death; its child is in the next listing.
ROUNDS = 50
ROUND_S = 0.02
# Path of this module's groups in /proc/self/cgroup.
OWN_GROUP = re.compile(r"^0::(.*)/primerl-[0-9a-f]{32}/\d+$", re.MULTILINE)


def marked(mark: str, name: str = MARK) -> list[int]:
    """Process ids whose environment carries the mark (Linux; elsewhere process groups have to do)."""
    wanted = f"{name}={mark}".encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(pid)
    return found


def children() -> list[int]:
    """Process ids of those that have this process as their parent, and still run."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
            if int(parent) == os.getpid() and state != b"Z":
                found.append(pid)
    return found


def _pids() -> list[int]:
    try:
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    except OSError:
        return []


def kill_all(find: Callable[[], Iterable[int]]) -> None:
    """SIGKILL to everything that is found, until nothing is."""
    for _ in range(ROUNDS):
        found = list(find())
        if not found:
            return
        for pid in found:
            send(pid, signal.SIGKILL)
        time.sleep(ROUND_S)


def kill_marked(mark: str) -> None:
    kill_all(lambda: marked(mark))


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def adopt_orphans() -> None:
    """This process becomes the parent of what its descendants leave behind (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Tree:
    """One process of the run, with all that it starts."""

    def __init__(self, groups: Groups, number: int) -> None:
        self._run = groups.mark
        self.mark = f"{groups.mark}.{number}"
        self._group = groups.make(number)

    def take(self, pid: int) -> None:
        """Into the control group; 0 is the process that calls."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                _write(f"{self._group}/cgroup.procs", str(pid))

    def left(self) -> list[int]:
        return sorted({*_members(self._group), *marked(self.mark, PART)})

    def terminate(self) -> bool:
        """Sends SIGTERM to what is left; returns whether there is anything. A process that has the run's mark alone
        notices its process's end by itself (the daemon of a tailnet), and would take a second signal as an order to
        hurry."""
        found = self.left()
        own = set(marked(self.mark, PART)) if found else set()
        told = set(marked(self._run)) - own if found else set()
        for pid in set(found) - told:
            send(pid, signal.SIGTERM)
        if not found:
            _remove(self._group)
        return bool(found)

    def kill(self) -> None:
        _kill_group(self._group)
        kill_all(lambda: marked(self.mark, PART))
        _remove(self._group)


class Groups:
    """The control groups of a run. There may be none: every way out of here says so by None."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        own = _own_group()
        self._folder = None if own is None else f"{own}/primerl-{mark}"

    def make(self, number: int) -> str | None:
        if self._folder is None:
            return None
        group = f"{self._folder}/{number}"
        try:
            os.makedirs(group, exist_ok=True)
        except OSError:  # read-only, as in most containers, or another user's
            self._folder = None
            return None
        return group

    def kill(self) -> None:
        """All of the run, and the groups themselves."""
        if self._folder is None:
            return
        _kill_group(self._folder)
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.is_dir():
                    _kill_group(entry.path)
                    _remove(entry.path)
        _remove(self._folder)


def kill_run(mark: str) -> None:
    """Kills everything of the run, from a process that is not its guard."""
    Groups(mark).kill()
    kill_marked(mark)


def without_own_group(groups: str) -> str:
    """What /proc/self/cgroup says, as if a process of a run were where its guard is."""
    return OWN_GROUP.sub(lambda found: f"0::{found[1] or '/'}", groups)


def _own_group() -> str | None:
    """Folder of this process's group in the unified hierarchy."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            path = next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), None)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split(" - ", 1) for line in file]
    except OSError:
        return None
    for before, after in mounts:
        root, place = before.split()[3:5]
        if path is not None and after.startswith("cgroup2 ") and (path + "/").startswith(root.rstrip("/") + "/"):
            return place + path[len(root.rstrip("/")) :].rstrip("/")
    return None


def _members(group: str | None) -> list[int]:
    if group is None:
        return []
    with contextlib.suppress(OSError, ValueError), open(f"{group}/cgroup.procs", encoding="ascii") as file:
        return [int(line) for line in file]
    return []


def _kill_group(group: str | None) -> None:
    if group is None:
        return
    with contextlib.suppress(OSError):  # Linux before 5.14
        _write(f"{group}/cgroup.kill", "1")
    kill_all(lambda: _members(group))


def _remove(group: str | None) -> None:
    """Once nothing is in it; another one that has been killed may take a moment."""
    for _ in range(ROUNDS if group is not None else 0):
        try:
            os.rmdir(str(group))
        except FileNotFoundError:
            return
        except OSError:
            if _members(group):
                return
            time.sleep(ROUND_S / 10)


def _write(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
