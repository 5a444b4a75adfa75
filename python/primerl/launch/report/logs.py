"""What the log of a process says of its end."""

from __future__ import annotations

import os
import re
from pathlib import Path

from primerl.launch.placement.protocol import Process

LOG_LINES = 20
INDENT = "  "
"""Of the lines of a log that are shown."""
EXCEPTION = re.compile(r"[^\W\d][\w.]*(: .*)?")
"""The last line of Python's traceback, after the last of its indented lines."""
BY_EXCEPTION = 1
"""Python's exit code after an exception that was not caught. With another one, a traceback in the log is no cause."""


def describe_end(process: Process, remark: str = "") -> str:
    """What happened, in the first line, and the end of its log. `remark`: the end of the first line."""
    log = tail(process.log)
    cause = cause_of(process)
    why = f" ({cause})" if cause else ""
    return f"{process.name} {process.describe_end()}{why}{remark}\nthe end of {process.log}:\n{log}".rstrip()


def cause_of(process: Process) -> str | None:
    """The last word of one that gave up, or what its traceback ends with."""
    if (process.code or 0) <= 0:
        return None
    log = tail(process.log)
    return last_error(log) or (last_exception(log) if process.code == BY_EXCEPTION else None)


def last_error(log: str) -> str | None:
    """The last word of a process that gave up, `error: ...`, is why."""
    words = [line.strip().removeprefix("error: ") for line in log.splitlines() if line.startswith("  error: ")]
    return words[-1] if words else None


def last_exception(log: str) -> str | None:
    """Of the end of a log: what the traceback says with which it ends, if it does."""
    *_, before, last = ["", "", *log.rstrip().splitlines()]
    line = last.removeprefix(INDENT)
    return line if before.startswith(f"{INDENT}  ") and EXCEPTION.fullmatch(line) else None


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log of any size."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            content = file.read().decode(errors="replace")
    except OSError:
        return "  (no log)"
    return "\n".join(f"{INDENT}{line}" for line in content.splitlines()[-lines:]) or "  (the log is empty)"
