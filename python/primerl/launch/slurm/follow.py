"""Following a job: what its launcher prints, what Slurm says of it, and its end."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from primerl.launch.slurm import jobs, script
from primerl.launch.supervise.failures import FAILED, INTERRUPTED
from primerl.launch.supervise.watching import Interrupted, Interrupts

LOOK_EVERY_S = 0.2
ASK_EVERY_S = 2.0
# The log on a network is seen here with some delay.
LAST_LINES_S = 1.0
STOP_S = 120.0
UNKNOWN_S = 60.0
"""How long the controller may not know the job before it is given up."""


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def to_the_end(job: jobs.Job, folder: Path, say: Callable[[str], None], offset: int) -> int:
    """Returns the exit code of the run. Ctrl-C stops the run, which can be resumed; a second one leaves it alone,
    as does the end of the terminal (SIGHUP)."""
    log = Log(folder / script.LOG, offset)
    # That ends this command at once, and nothing else: the job does not need it.
    interrupts = Interrupts(but=[signal.SIGHUP])
    shown = jobs.State("", "")
    asked_at, stopping, unknown_since = 0.0, False, None
    with interrupts:
        while True:
            log.show()
            now = time.monotonic()
            if now - asked_at >= ASK_EVERY_S:
                asked_at = now
                found = jobs.state(job)
                if found.state == jobs.UNKNOWN:
                    unknown_since = unknown_since or now
                    if now - unknown_since < UNKNOWN_S:
                        continue
                else:
                    unknown_since = None
                if (found.state, found.nodes) != (shown.state, shown.nodes):
                    shown = found
                    say(f"job {job.id} is {found.told()}{f' on {found.nodes}' if found.nodes else ''}")
                if found.is_over:
                    return _ended(job, folder, found, log, say, stopped=stopping)
            if not stopping:
                try:
                    interrupts.check()
                except Interrupted:
                    stopping = True
                    say(f"stopping job {job.id} (Ctrl-C again leaves it)")
                    try:
                        jobs.cancel(job, shown, kill=False)
                    except jobs.SlurmError as error:
                        say(f"job {job.id} could not be stopped: {error}")
            time.sleep(LOOK_EVERY_S)


def _ended(
    job: jobs.Job, folder: Path, found: jobs.State, log: Log, say: Callable[[str], None], *, stopped: bool
) -> int:
    time.sleep(LAST_LINES_S)
    log.show()
    code = exit_code(job, folder, found)
    if log.is_empty and code:
        where = f" ({found.nodes})" if found.nodes else ""
        say(
            f"job {job.id} is {found.told()} and has written no log; check that {folder} and the Python environment "
            f"are at the same paths on its nodes{where}"
        )
    return INTERRUPTED if stopped and code else code


def exit_code(job: jobs.Job, folder: Path, found: jobs.State) -> int:
    """The launcher's own, where it has ended in order."""
    if found.state == "COMPLETED":
        return 0
    with contextlib.suppress(OSError, ValueError, LookupError):
        summary = folder / "run" / "summary.json"
        if summary.stat().st_mtime >= job.submitted:
            code = json.loads(summary.read_text(encoding="utf-8"))["exit_code"]
            if code:
                return int(code)
    return INTERRUPTED if found.state == jobs.CANCELLED else found.exit_code or FAILED


class Log:
    """A file that grows, shown from `offset` on."""

    def __init__(self, file: Path, offset: int) -> None:
        self.file = file
        self.at = self.begin = offset

    @property
    def is_empty(self) -> bool:
        return self.at == self.begin

    def show(self) -> None:
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.at)
                content = opened.read()
        except OSError:
            return
        self.at += len(content)
        if content:
            sys.stdout.write(content.decode(errors="replace"))
            with contextlib.suppress(OSError):
                sys.stdout.flush()
