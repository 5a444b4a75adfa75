"""The lock of a run's folder: its launcher holds it, and the kernel lets it go at the launcher's death."""

from __future__ import annotations

import errno
import fcntl
import time
from pathlib import Path
from typing import IO

LOCK = Path("run") / "launcher.lock"
# A process that checks whether a run is active holds the lock for an instant, too.
LOOKED_AT_S = 0.5
AGAIN_S = 0.05


def in_use(folder: Path) -> bool:
    """Whether a launcher holds the folder's lock."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise
    return False


def take(file: IO[str]) -> bool:
    """Locks the opened file, until it is closed. False where another launcher holds it."""
    deadline = time.monotonic() + LOOKED_AT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(AGAIN_S)
