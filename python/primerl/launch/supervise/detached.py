"""A run in a session of its own: who starts it waits until its checks have passed, then leaves.

    primerl run -d ── starts, waits ──> launcher: checks ──> claims the folder, tells its id ──> trains
          │                                   └── refuses: exits; its output is shown
          └── prints the id, exits 0

Until the folder is the run's own nothing may be written there, so what the launcher says goes to a file in the state
folder at first, which it then moves to `output_dir/logs/launcher.log`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl.runs.state import private_folder

VARIABLE = "PRIMERL_DETACHED"
"""To the launcher: descriptor to tell its start by, and the file its output goes to."""
LOG = Path("logs") / "launcher.log"


@dataclass(frozen=True, slots=True)
class Start:
    run_id: str | None
    """None where it was refused or failed, or the registry could not be written (then `started` is true)."""
    started: bool
    code: int | None
    """Exit code of one that was refused."""
    said: str
    """What it said until then."""
    pid: int


def start(arguments: Sequence[str], folder: Path) -> Start:
    """Runs `primerl rl ARGUMENTS` in `folder`; returns when its checks have passed, or it has ended. Raises StateError
    where the state folder cannot be written to."""
    descriptor, name = tempfile.mkstemp(prefix="launcher.", suffix=".log", dir=private_folder("starting"))
    output = Path(name)
    reader, writer = os.pipe()
    try:
        with os.fdopen(reader, "rb") as news:
            # The new process inherits it: a SIGHUP is for who sits at a terminal.
            before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "primerl", "rl", *arguments],
                    cwd=folder,
                    env={**os.environ, VARIABLE: f"{writer}:{output}", "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=descriptor,
                    stderr=descriptor,
                    start_new_session=True,
                    pass_fds=[writer],
                )
            finally:
                signal.signal(signal.SIGHUP, before)
                os.close(writer)
                os.close(descriptor)
            try:
                said = news.read().decode()  # until the launcher has told its id, or is no more
            except BaseException:
                process.terminate()  # Ctrl-C: no one would learn of its end
                raise
        if said:
            run_id = said.removeprefix("started ").strip()
            return Start(run_id or None, True, None, "", process.pid)
        # It may have closed the pipe, but nothing but its end does so without output.
        code = process.wait()
        return Start(None, False, code, output.read_text(errors="replace", encoding="utf-8"), process.pid)
    finally:
        output.unlink(missing_ok=True)


def has_started(folder: Path, run_id: str | None) -> None:
    """To be called by a launcher whose folder is locked: output goes there from now on, and the waiting command is
    notified. Nothing happens to one that was not detached."""
    given = os.environ.pop(VARIABLE, None)  # not for the processes of the run
    if given is None:
        return
    descriptor, _, name = given.partition(":")
    log = folder / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as opened, contextlib.suppress(FileNotFoundError):
        opened.write(Path(name).read_bytes())
        opened.flush()
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    with contextlib.suppress(BrokenPipeError):  # the waiting command was killed; the run continues
        os.write(int(descriptor), f"started {run_id or ''}\n".encode())
    os.close(int(descriptor))
