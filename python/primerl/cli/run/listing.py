"""`primerl run list`."""

from __future__ import annotations

import json
import time
from typing import Any

from primerl.cli.arguments import parse
from primerl.cli.run.common import ago, parser_of, show
from primerl.config.complaint import fail
from primerl.redaction import redact
from primerl.runs import secrets
from primerl.runs.registry import Registry, Run
from primerl.runs.standing import Standing, standing
from primerl.runs.state import StateError


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "list", "Lists the runs, fine-tunings and evaluations of this user, the newest first.", of_run=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--status", metavar="WORD", help="only those that stand so, for example RUNNING")
    chosen = parse(parser, arguments)
    if isinstance(chosen, int):
        return chosen
    try:
        with Registry() as registry:
            runs = registry.all()
        secrets.note_all()
    except StateError as error:
        return fail(str(error), title="No list")
    found = [(run, standing(run)) for run in runs]
    found = [(run, how) for run, how in found if chosen.status in (None, how.status, how.status.lower())]
    if chosen.json:
        print(json.dumps([described(run, how) for run, how in found], indent=2))
    elif found:
        header = ["id", "name", "kind", "status", "step", "model", "environments", "started", "folder"]
        show(header, [_row(run, how) for run, how in found], right=(4,))
    else:
        print("no runs; `primerl run init > rl.toml` writes a config to start from")
    return 0


def described(run: Run, how: Standing) -> dict[str, Any]:
    """As `--json` shows it; times are seconds since 1970."""
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
    }


def _row(run: Run, how: Standing) -> list[Any]:
    began = f"{ago(time.time() - run.started)} ago"
    environments = ", ".join(run.environments)
    # `weights/step_60` alone names no model.
    parts = [part for part in run.model.split("/") if part != "weights"]
    model = "/".join(parts[-2:] if parts[-1].startswith("step_") else parts[-1:])
    step = None if run.kind == "eval" else how.step
    return [run.id, run.name, run.kind, how.status, step, model, environments, began, run.output_dir]
