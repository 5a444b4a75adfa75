"""`primerl run stop`."""

from __future__ import annotations

import argparse
import os
import signal
import time

from primerl.cli.run.common import FAILED, STEPLESS, can_go_on, gone, parser_of, with_run
from primerl.launch.resume.position import goes_on_from
from primerl.launch.slurm import jobs
from primerl.launch.supervise.lock import in_use
from primerl.runs.registry import Run
from primerl.runs.standing import Standing, standing

WAIT_S = 120.0
LOOK_EVERY_S = 0.1


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "stop", "Asks a run's launcher to stop all its processes, and waits for them. The run can be resumed."
    )
    parser.add_argument("--kill", action="store_true", help="kill them, where they do not stop (SIGKILL)")
    # A flag of `prime rl stop`, which asks first.
    parser.add_argument("-f", "--force", action="store_true", help=argparse.SUPPRESS)
    return with_run(parser, arguments, _stop)


def _stop(run: Run, chosen: argparse.Namespace) -> int:
    active = jobs.active(run.output_dir)
    if active is not None:
        return _stop_job(run, *active, kill=chosen.kill)
    said = gone(run)
    # The lock went with the folder, where that was deleted under a run.
    if not in_use(run.output_dir) and (said is None or run.ended is not None or not run.launcher_lives()):
        how = standing(run)
        print(f"{run.id} is not running: it is {how.status}{_at(run, how)}" + (f"\n{said}" if said else ""))
        return 0
    began = time.monotonic()
    if not send(run, signal.SIGKILL if chosen.kill else signal.SIGTERM):
        print(
            f"{run.id}: {run.output_dir} is in use, but not by process {run.pid}, which was noted; it was started on "
            "another machine, or with another state folder, so stop it there"
        )
        return FAILED
    while in_use(run.output_dir) or run.launcher_lives():
        if time.monotonic() - began > WAIT_S:
            print(f"{run.id} has not stopped within {WAIT_S:.0f} s; --kill kills it")
            return FAILED
        time.sleep(LOOK_EVERY_S)
    how, did = standing(run), "killed" if chosen.kill else "stopped"
    if can_go_on(run):
        then = f"`primerl run resume {run.id}` resumes {goes_on_from(run.output_dir)}"
    else:
        then = "there is nothing to resume from: start it again by its own file"
    print(f"{did} {run.id} after {time.monotonic() - began:.1f} s{_at(run, how, ',')}; {then}")
    return 0


def _stop_job(run: Run, job: jobs.Job, found: jobs.State, *, kill: bool) -> int:
    """A launcher on a node of a Slurm job gets its signal from Slurm; a job that waits is cancelled."""
    began = time.monotonic()
    try:
        jobs.cancel(job, found, kill=kill)
        while not (found := jobs.state(job)).is_over or in_use(run.output_dir):
            if time.monotonic() - began > WAIT_S:
                print(f"job {job.id} of {run.id} has not ended within {WAIT_S:.0f} s; --kill cancels it")
                return FAILED
            time.sleep(5 * LOOK_EVERY_S)
    except jobs.SlurmError as error:
        print(f"job {job.id} of {run.id} could not be stopped: {error}")
        return FAILED
    print(
        f"stopped job {job.id} of {run.id} after {time.monotonic() - began:.1f} s{_at(run, standing(run), ',')}; "
        f"`primerl run resume {run.id}` submits another, which resumes {goes_on_from(run.output_dir)}"
    )
    return 0


def _at(run: Run, how: Standing, before: str = "") -> str:
    """An evaluation has no steps, and of a run whose folder is gone they are not known."""
    return "" if run.kind in STEPLESS or how.step is None else f"{before} at step {how.step}"


def send(run: Run, number: signal.Signals) -> bool:
    """To the run's launcher. False where that process is no more."""
    if not hasattr(os, "pidfd_open"):
        if run.launcher_lives():
            os.kill(run.pid, number)
            return True
        return False
    try:
        descriptor = os.pidfd_open(run.pid)
    except OSError:
        return False
    try:
        # Looked at after it was opened: from here on the descriptor is that process and no other.
        if not run.launcher_lives():
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
