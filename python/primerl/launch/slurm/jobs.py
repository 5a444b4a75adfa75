"""What Slurm knows of a job, and the note of it in the run's folder. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path("run") / "slurm.json"
ASK_S = 30.0
FIELD = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode|NodeList|Restarts|BatchHost)=(\S*)")
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
ACTIVE = frozenset({"RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT", "RESIZING"})
UNKNOWN, SILENT, CANCELLED = "UNKNOWN", "NOT KNOWN", "CANCELLED"
FORGOTTEN = "invalid job id"
"""What `scontrol` says of a job that ended some minutes ago, or never was; all else that it complains of says nothing
of the job."""
LISTED_S, LISTING_S = 2.0, 5.0
_queues: dict[str | None, tuple[float, dict[str, State]]] = {}


class SlurmError(Exception):
    """A command of Slurm is missing, or has refused. The message says which, and what it said."""


@dataclass(frozen=True, slots=True)
class Job:
    """As noted in the run's folder."""

    id: str
    submitted: float
    """Seconds since 1970."""
    nodes: int
    conf: str | None = None
    """SLURM_CONF at that time, where it was set."""


@dataclass(frozen=True, slots=True)
class State:
    state: str
    """Slurm's word, or `UNKNOWN` where it has forgotten the job, or `SILENT` where it does not answer."""
    reason: str = ""
    exit_code: int | None = None
    nodes: str = ""
    restarts: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    @property
    def is_over(self) -> bool:
        return self.state not in WAITING | ACTIVE | {SILENT}

    def told(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.state}{reason}"


def command(
    *words: str, environ: Mapping[str, str] | None = None, timeout_s: float = ASK_S, given: str | None = None
) -> str:
    """Output of one of Slurm's commands, which gets `given` as its input. Raises SlurmError."""
    try:
        done = subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=None if environ is None else dict(environ),
        )
    except FileNotFoundError:
        raise SlurmError(f"there is no {words[0]} on this machine; start it on a node that submits jobs") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} has not answered within {timeout_s:.0f} s") from None
    except OSError as error:
        raise SlurmError(f"{words[0]}: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SlurmError(said)
    return done.stdout


def note(folder: Path, job: Job) -> None:
    from primerl.config.process_files.files import write_text

    write_text(folder / FILE, json.dumps(asdict(job)) + "\n")


def noted(folder: Path) -> Job | None:
    """The last job of the run in the folder; None of a run that never was one."""
    try:
        return Job(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def state(job: Job) -> State:
    """Raises nothing: a controller that does not answer is a reason."""
    environ = {**os.environ, **({"SLURM_CONF": job.conf} if job.conf else {})}
    otherwise = State(UNKNOWN)
    try:
        return parsed(command("scontrol", "show", "job", "-o", job.id, environ=environ))
    except SlurmError as error:
        if FORGOTTEN not in str(error).lower():
            otherwise = State(SILENT, str(error))
    # Only the accounting knows a job that ended some time ago.
    try:
        found = command("sacct", "-nXP", "-j", job.id, "-o", "State,ExitCode", environ=environ).splitlines()
        word, _, code = found[-1].partition("|")
        return State(word.split()[0], "", int(code.split(":")[0]))
    except (SlurmError, IndexError, ValueError):
        return otherwise


def parsed(text: str) -> State:
    """Output of `scontrol show job -o`: a line for each component of the job, the first for the one that counts."""
    lines = [dict(FIELD.findall(line)) for line in text.splitlines() if line.strip()]
    found = lines[0] if lines else {}
    nodes = [line["NodeList"] for line in lines if line.get("NodeList") not in (None, "(null)")]
    code, _, number = found.get("ExitCode", "").partition(":")
    exit_code = int(code) if code.isdigit() else None
    if number.isdigit() and int(number) and not exit_code:
        exit_code = 128 + int(number)
    restarts = found.get("Restarts", "0")
    return State(
        found.get("JobState", UNKNOWN),
        found.get("Reason", ""),
        exit_code,
        ",".join(nodes),
        int(restarts) if restarts.isdigit() else 0,
    )


def queue(conf: str | None) -> dict[str, State]:
    """The jobs of this user that wait or run, by id; none where Slurm does not answer. Asked once in LISTED_S."""
    now = time.monotonic()
    kept = _queues.get(conf)
    if kept is not None and now - kept[0] < LISTED_S:
        return kept[1]
    found: dict[str, State] = {}
    with contextlib.suppress(SlurmError):
        environ = {**os.environ, **({"SLURM_CONF": conf} if conf else {})}
        words = ("squeue", "-h", "--me", "-o", "%A|%T|%r|%N")
        for line in command(*words, environ=environ, timeout_s=LISTING_S).splitlines():
            number, word, reason, nodes = line.split("|")
            found[number] = State(word, reason, nodes=nodes)
    _queues[conf] = now, found
    return found


def queued(folder: Path) -> tuple[Job, State] | None:
    """As `active`, by a list that may be some seconds old: for commands that show many runs."""
    job = noted(folder)
    found = None if job is None else queue(job.conf).get(job.id)
    return None if job is None or found is None or found.is_over else (job, found)


def active(folder: Path) -> tuple[Job, State] | None:
    """The run's job that waits or runs, or of which Slurm does not say that it is over; None where it has none."""
    job = noted(folder)
    if job is None:
        return None
    found = state(job)
    return None if found.is_over else (job, found)


def in_the_way(folder: Path) -> str | None:
    """A sentence about the run's job that may still use the folder; None where it has none."""
    found = active(folder)
    if found is None:
        return None
    job, how = found
    if how.state == SILENT:
        return (
            f"whether job {job.id} of it is over is not known: {how.reason}; try again once Slurm answers, or delete "
            f"{folder / FILE} if you know that it is"
        )
    return f"job {job.id} uses it, which is {how.told()}; stop it"


def cancel(job: Job, found: State, *, kill: bool) -> None:
    """Asks the launcher in the job to stop; one that waits, or is to be killed, is cancelled. Raises SlurmError."""
    environ = {**os.environ, **({"SLURM_CONF": job.conf} if job.conf else {})}
    if kill or found.is_waiting:
        command("scancel", job.id, environ=environ)
    else:
        command("scancel", "--batch", "--signal=TERM", job.id, environ=environ)
