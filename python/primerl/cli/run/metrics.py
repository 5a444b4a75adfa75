"""`primerl run metrics`."""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from datetime import datetime
from typing import Any

from primerl.cli.arguments import count
from primerl.cli.run.common import FAILED, add_json, natural, parser_of, show, with_run
from primerl.config.errors.fail import fail
from primerl.launch.report.evaluations import mark, measured
from primerl.runs import served
from primerl.runs.registry import Run

FILES = {"eval": "evals.jsonl", served.KIND: served.STEPS}
OF_CLIENTS = ("step", "loss", "grad_norm", "learning_rate", "timestamp")
"""Columns of a server's table; a loss is of a token."""
SCORE = re.compile(r"(avg|pass)@\d+")


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "metrics",
        "The metrics of a run's last step; of all steps as CSV or JSON. Of an evaluation its scores, by environment; "
        "of a server of the Tinker API the last step of each training client.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="all steps, a line each")
    add_json(form, "all steps, as one JSON array")
    parser.add_argument("--min-step", type=natural, metavar="N", help="only of steps from this one on")
    parser.add_argument("--max-step", type=natural, metavar="N", help="only of steps up to this one")
    parser.add_argument("-n", "--limit", type=count, metavar="N", help="show only the last N steps")
    return with_run(parser, arguments, _metrics, needs_folder=True)


def _metrics(run: Run, chosen: argparse.Namespace) -> int:
    from primerl.runs.report import DamagedRunError, read_lines

    try:
        # An evaluation has no steps: a line is an environment's.
        steps = read_lines(run.output_dir / FILES.get(run.kind, "metrics.jsonl"))
    except DamagedRunError as error:
        print(f"primerl run metrics: {error}", file=sys.stderr)
        return FAILED
    found = bool(steps)
    steps = _within(steps, chosen)
    if chosen.json:
        print(json.dumps(steps, indent=1))
        return 0
    if found and not steps:
        return fail(f"{run.id} has trained none of these steps", title="No metrics")
    if not steps:
        what = "measured no environment to its end" if run.kind == "eval" else "trained no step"
        return fail(f"{run.id} has {what} yet", title="No metrics")
    if chosen.csv:
        # A metric may come later than at the first step: of an evaluation, say.
        lines = [_columns(step) for step in steps]
        names = list(dict.fromkeys(name for line in lines for name in line))
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return 0
    if run.kind == "eval":
        show(["score", "value"], _scores(steps), right=(1,))
        return 0
    if run.kind == served.KIND:
        show(["client", *OF_CLIENTS], _of_clients(steps), right=tuple(range(1, len(OF_CLIENTS) + 1)))
        return 0
    last = steps[-1]
    # What is looked for first.
    names = sorted(last, key=lambda name: (name != "step", not name.startswith("reward/")))
    rows = [[name, _shown(name, last[name])] for name in names]
    show(["metric", f"step {last.get('step')}"], [*rows, *_evaluations(run)], right=(1,))
    return 0


def _columns(step: dict[str, Any]) -> dict[str, Any]:
    """An evaluation's line has tables of scores: `metrics/<name>`."""
    flat: dict[str, Any] = {}
    for name, value in step.items():
        flat |= {f"{name}/{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _within(steps: list[dict[str, Any]], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    low, high = chosen.min_step or 0, sys.maxsize if chosen.max_step is None else chosen.max_step
    # An evaluation's lines are of no step.
    found = [step for step in steps if low <= step.get("step", low) <= high]
    return found if chosen.limit is None else found[len(found) - min(chosen.limit, len(found)) :]


def _of_clients(steps: list[dict[str, Any]]) -> list[list[Any]]:
    """The last step of each training client of a server; the newest is the last."""
    last: dict[str, dict[str, Any]] = {}
    for step in steps:
        last.pop(step["client"], None)
        last[step["client"]] = step
    return [
        [client, *(_shown(name, "-" if step.get(name) is None else step[name]) for name in OF_CLIENTS)]
        for client, step in last.items()
    ]


def _shown(name: str, value: Any) -> Any:
    if name == "timestamp":
        return datetime.fromtimestamp(value).astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{value:.6g}" if isinstance(value, float) else value


def _scores(lines: list[dict[str, Any]]) -> list[list[Any]]:
    """avg@k and pass@k of an evaluation, with the ends of their intervals."""
    return [
        [f"{line['environment']}/{name}{f' ({measured(line)})' if mark(line) else ''}", _shown(name, value)]
        for line in lines
        for name, value in line.items()
        if SCORE.match(name)
    ]


def _evaluations(run: Run) -> list[list[Any]]:
    """Scores of the newest of each environment, by the names that monitors get."""
    from primerl.monitors.collect import evaluation_prefix
    from primerl.runs.report import read_lines

    newest = {line["environment"]: line for line in read_lines(run.output_dir / "evals.jsonl")}
    rows = []
    for environment, line in newest.items():
        prefix = evaluation_prefix(environment, line)
        version = line.get("version", line.get("policy_at_the_time"))
        scores = {name: value for name, value in line.items() if SCORE.fullmatch(name)}
        at = f"version {version}{mark(line)}"
        rows += [[f"{prefix}{name} ({at})", _shown(name, value)] for name, value in scores.items()]
    return rows
