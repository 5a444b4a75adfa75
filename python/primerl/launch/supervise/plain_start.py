"""A process that the guard starts itself, as its child. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


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
    except BaseException as error:  # noqa: BLE001 - the parent gets the reason; no second guard may stay
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
