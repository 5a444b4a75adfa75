"""`primerl run checkpoints`: what a run has saved, in its folder and in the store."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from primerl.cli.run.common import parser_of, show, size, with_run
from primerl.config.complaint import fail
from primerl.runs.registry import Run


def main(arguments: list[str]) -> int:
    parser = parser_of("checkpoints", "What a run has saved: in its own folder, and in its store where it has one.")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    return with_run(parser, arguments, _checkpoints)


def _failed(run: Run) -> dict[str, str]:
    from primerl.runs.uploads import REPORT

    try:
        return dict(json.loads((run.output_dir / REPORT).read_text())["failed"])
    except (OSError, ValueError, LookupError):
        return {}


def _checkpoints(run: Run, chosen: argparse.Namespace) -> int:
    if run.kind == "eval":
        results = run.output_dir / "results.jsonl"
        return fail(
            f"{run.id} is an evaluation, which trains nothing and saves no checkpoints; its results are in {results}",
            title="No checkpoints",
        )
    from primerl.runs.entries import StoreError
    from primerl.runs.saved import local_checkpoints
    from primerl.runs.store import store_of_run

    found = local_checkpoints(run.output_dir)
    problem = None
    try:
        store = store_of_run(run.config)
        found += [] if store is None else store.saved(run.id)
    except StoreError as error:
        problem = str(error)
    if chosen.json:
        print(json.dumps([asdict(saved) for saved in found], indent=2))
    elif found:
        rows = [
            [s.step, s.kind, "READY" if s.ready else "incomplete", size(s.bytes), "yes" if s.weights_only else "", s.at]
            for s in found
        ]
        show(["step", "what", "status", "size", "weights only", "id or folder"], rows, right=(0, 3))
        for name, reason in _failed(run).items():
            print(f"{name} is not stored yet: {reason}")
    elif problem is None:
        print(f"{run.id} has saved nothing yet; `ckpt.interval` says after how many steps it does")
    return 0 if problem is None else fail(problem, title="The store cannot be read")
