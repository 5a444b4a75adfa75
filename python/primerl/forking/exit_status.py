"""How a process ended that is no child of this one: what the kernel tells anyone who holds a pidfd. For Linux.

While the process is a zombie, the last field of /proc/PID/stat is its status; once its parent has taken it, the pidfd
has it (Linux 6.15 or newer). In between there is nothing, so a caller that asks after its end has an answer at once.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct

# In place of the code of a process that has ended. Below 0, as of one that was killed: it has not exited in order.
NOT_KNOWN = -255
# linux/pidfd.h: struct pidfd_info begins with a mask of what is asked for, and answered, and ends with the status.
INFO_SIZE = 64
EXIT = 1 << 3
GET_INFO = 3 << 30 | INFO_SIZE << 16 | 0xFF << 8 | 11


def described(code: int) -> str:
    """How a process with this exit code ended, as a predicate."""
    if code >= 0:
        return f"exited with code {code}"
    if code == NOT_KNOWN:
        return "has ended, killed or otherwise: its fork server, which would know, was gone"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def exit_code(pid: int, pidfd: int) -> int | None:
    """The exit status of an ended process, as `Popen.returncode` has it; None where it is not known."""
    status = _of_zombie(pid)
    # A process id is given to another process once its own has been taken from it.
    if status is None or not _is_zombie_yet(pidfd):
        status = _of_pidfd(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _of_zombie(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # 0 is also what is shown to those who may not know.
    return int(fields[-1]) or None if fields[0] == b"Z" else None


def _is_zombie_yet(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError:
        return False
    return True


def _of_pidfd(pidfd: int) -> int | None:
    info = bytearray(INFO_SIZE)
    struct.pack_into("Q", info, 0, EXIT)
    try:
        fcntl.ioctl(pidfd, GET_INFO, info)
    except OSError:  # an older kernel
        return None
    told: int = struct.unpack_from("Q", info)[0]
    status: int = struct.unpack_from("i", info, INFO_SIZE - 4)[0]
    return status if told & EXIT else None
