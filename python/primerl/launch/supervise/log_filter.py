"""Logs without secrets: a process that writes what comes through a pipe, less the texts that are to be hidden.

The writer is a fork of the guard, and ends when all have ended that can write to it: so no secret reaches the log from
any of them, and the last output of a process that was killed does. Standard library only.
"""

from __future__ import annotations

import os

HIDDEN = b"<secret>"
LONGEST_LINE = 1 << 16


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
