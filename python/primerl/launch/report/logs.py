"""What the log of a process says of its end."""

from __future__ import annotations

import os
import re
from pathlib import Path

from primerl.launch.placement.protocol import Process

LOG_LINES = 20
INDENT = "  "
"""Before each line of a log that is shown."""
LAST_WORDS = re.compile(r"(?:error: |primerl \S+: |\d\d:\d\d:\d\d ERROR |[-\d]{10} [\d:,]{12} ERROR \S+: )(.*)")
"""How processes of a run say what they give up for."""
EXCEPTION = re.compile(r"[^\W\d][\w.]*(: .*)?")
"""The last line of Python's traceback, after the last of its indented lines."""
BY_EXCEPTION = 1
"""Python's exit code after an exception that was not caught. With another one, a traceback in the log is no cause."""


def describe_end(process: Process, remark: str = "") -> str:
    """What happened, in the first line, and the end of its log. `remark`: the end of the first line."""
    log = own_tail(process)
    cause = cause_of(process)
    why = f" ({cause})" if cause else ""
    return f"{process.name} {process.describe_end()}{why}{remark}\nthe end of {process.log}:\n{log}".rstrip()


def cause_of(process: Process) -> str | None:
    """The last words of one that gave up, or what its traceback ends with."""
    if (process.code or 0) <= 0:
        return None
    log = own_tail(process)
    found = last_exception(log) if process.code == BY_EXCEPTION else None
    return found or last_error(log)


def last_error(log: str) -> str | None:
    """The last words of a process that gave up, in the end of its log."""
    words = [LAST_WORDS.fullmatch(line.removeprefix(INDENT)) for line in log.splitlines()]
    return next((found[1] for found in reversed(words) if found), None)


def last_exception(log: str) -> str | None:
    """What the traceback says with which this end of a log ends, if it does."""
    *_, before, last = ["", "", *log.rstrip().splitlines()]
    line = last.removeprefix(INDENT)
    return line if before.startswith(f"{INDENT}  ") and EXCEPTION.fullmatch(line) else None


def own_tail(process: Process, lines: int = LOG_LINES) -> str:
    """The last lines that a process has written; its log may begin with those of earlier ones."""
    return tail(process.log, lines, after=process.log_from)


def tail(log: Path, lines: int = LOG_LINES, *, after: int = 0) -> str:
    """The last lines of a log of any size, of those `after` so many bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(after, file.seek(0, os.SEEK_END) - 16_384))
            content = file.read().decode(errors="replace")
    except OSError:
        return "  (no log)"
    return "\n".join(f"{INDENT}{line}" for line in content.splitlines()[-lines:]) or "  (the log is empty)"
