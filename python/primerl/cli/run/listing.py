"""`primerl run list`."""

from __future__ import annotations

import json
import time
from typing import Any

from primerl.cli.arguments import count
from primerl.cli.run.common import STEPLESS, add_json, ago, parser_of, show
from primerl.config.errors.fail import fail
from primerl.launch.secrets import note_stored
from primerl.launch.slurm import jobs
from primerl.process.redaction import redact
from primerl.runs.registry import Registry, Run
from primerl.runs.standing import COMPLETED, FAILED, PENDING, RUNNING, STOPPED, Standing, in_a_line, standing
from primerl.runs.state import StateError

STATUS = (PENDING, RUNNING, STOPPED, COMPLETED, FAILED)
HEADER = ["id", "name", "kind", "status", "step", "model", "environments", "started", "folder"]


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "list", "Lists the runs, fine-tunings, evaluations and servers of this user, the newest first.", of_run=False
    )
    add_json(parser)
    parser.add_argument(
        "--status", metavar="WORD", type=str.upper, choices=STATUS, help=f"only those that are {', '.join(STATUS)}"
    )
    parser.add_argument("-n", "--num", type=count, metavar="N", help="show at most this many")
    chosen = parser.parse_args(arguments)
    try:
        with Registry(reading=True) as registry:
            runs = registry.all()
    except StateError as error:
        return fail(str(error), title="No list")
    note_stored()
    found = [(run, standing(run)) for run in runs]
    found = [(run, how) for run, how in found if chosen.status in (None, how.status)][: chosen.num]
    if chosen.json:
        print(json.dumps([described(run, how) for run, how in found], indent=2))
    elif found:
        # What is dropped first on a narrow terminal is least missed.
        rows = [_row(run, how) for run, how in found]
        ids = [job_of(run) for run, _ in found]
        if any(ids):
            header, rows = [*HEADER, "job"], [[*row, job] for row, job in zip(rows, ids, strict=True)]
        else:
            header = HEADER
        show(header, rows, right=(4,), optional=(8, 2, 6))
        for run, how in found:
            if how.status == FAILED and how.reason:
                print(f"{run.id} has failed: {_line(redact(how.reason))}")
    elif runs:
        print(f"none of {len(runs)} runs is {chosen.status}")
    else:
        print("no runs; `primerl run init > rl.toml` writes a config to start from")
    return 0


def described(run: Run, how: Standing) -> dict[str, Any]:
    """As `--json` shows it; times are seconds since 1970."""
    from primerl.runs.costs import cost

    return {
        "id": run.id,
        "name": run.name,
        "status": how.status,
        "reason": redact(how.reason),
        "step": how.step,
        "model": run.model,
        "environments": run.environments,
        "output_dir": str(run.output_dir),
        "kind": run.kind,
        "form": run.form,
        "started": run.started,
        "session_started": run.session_started,
        "ended": run.ended,
        "exit_code": run.exit_code,
        "pid": run.pid if run.launcher_lives() else None,
        "config": str(run.config),
        "job": job_of(run),
        "cost": cost(run.output_dir),
    }


def job_of(run: Run) -> str | None:
    """Id of its last job of Slurm, if it has had one."""
    job = jobs.noted(run.output_dir)
    return None if job is None else job.id


def _row(run: Run, how: Standing) -> list[Any]:
    began = f"{ago(time.time() - run.started)} ago"
    environments = ", ".join(run.environments)
    # `weights/step_60` alone names no model; of one that was fetched from a store the run is before the step.
    parts = [part for part in run.model.split("/") if part != "weights"]
    model = "/".join(parts[-2:] if parts[-1].startswith("step_") else parts[-1:])
    step = None if run.kind in STEPLESS else how.step
    return [run.id, run.name, run.kind, how.status, step, model, environments, began, run.output_dir]


def _line(reason: str) -> str:
    line = in_a_line(reason)
    return line if line == reason.strip() else f"{line} (`--json` has all of it)"
