"""A second process next to the guard, for when the guard cannot do its work: stopped (SIGSTOP), hanging, or killed at
the same moment as its owner. It only waits. Standard library only.

    owner ends   ──> the guard has GUARD_ENDS_S to end everything; then it is killed, and all that is left
    guard ends   ──> its owner ends what is left; where the owner ends at the same time, this process does
"""

from __future__ import annotations

import os
import select
import signal

from primerl.launch.supervise.trees import kill_run, send

# The guard's own grace for orphans, and some time on a machine that is busy.
GUARD_ENDS_S = 10.0
# Two deaths within this count as one.
SAME_MOMENT_S = 2.0


def begin(owner: int, mark: str) -> int:
    """Forks it, from the guard. Returns its process id; 0 if the system has no pidfds or no free process."""
    if not hasattr(os, "pidfd_open"):
        return 0
    guard = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return 0
    if pid != 0:
        return pid
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        # The guard's socket among them: its owner has to see it close.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        watch(owner, guard, mark)
    finally:
        os._exit(0)


def watch(owner: int, guard: int, mark: str) -> None:
    owner_end, guard_end = _opened(owner), _opened(guard)
    if os.getppid() != guard:
        guard_end = -1  # it ended before it could be watched
    ended = _first(owner_end, guard_end, None)
    if ended == guard_end:
        if _first(owner_end, -2, SAME_MOMENT_S) == owner_end:
            kill_run(mark)
        return
    if _first(guard_end, -2, GUARD_ENDS_S) != guard_end:
        send(guard, signal.SIGKILL)
    kill_run(mark)


def _opened(pid: int) -> int:
    """A descriptor that can be read once the process has ended; -1 where it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _first(one: int, other: int, timeout_s: float | None) -> int | None:
    """Which of them has ended; -1 has, and below that there is none. None when the time is up."""
    if -1 in (one, other):
        return -1
    poller = select.poll()
    for descriptor in (one, other):
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    found = poller.poll(None if timeout_s is None else timeout_s * 1000)
    return found[0][0] if found else None
