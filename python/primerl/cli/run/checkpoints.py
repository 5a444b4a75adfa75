"""`primerl run checkpoints`: what a run has saved, in its folder and in the store."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from primerl.cli.run.common import add_json, gone, parser_of, show, size, with_run
from primerl.config.errors.fail import fail
from primerl.runs import served
from primerl.runs.registry import Run
from primerl.runs.saved import Saved, local_checkpoints

STATUS = ("READY", "INCOMPLETE")


def main(arguments: list[str]) -> int:
    parser = parser_of("checkpoints", "What a run has saved: in its own folder, and in its store where it has one.")
    add_json(parser)
    only = f"only those that are {' or '.join(STATUS)}"
    parser.add_argument("-s", "--status", metavar="WORD", type=str.upper, choices=STATUS, help=only)
    return with_run(parser, arguments, _checkpoints)


def _failed(run: Run) -> dict[str, str]:
    from primerl.stores.worker import REPORT

    try:
        return dict(json.loads((run.output_dir / REPORT).read_text(encoding="utf-8"))["failed"])
    except (OSError, ValueError, LookupError):
        return {}


def _status(saved: Saved) -> str:
    return "READY" if saved.ready else "INCOMPLETE"


def _scores(run: Run) -> dict[int, dict[str, Any]]:
    """Evaluations of the very versions that were saved, by version and environment."""
    from primerl._core import RunCurves
    from primerl.runs.compare import evaluations_of, scores_by_version

    try:
        return scores_by_version(evaluations_of(RunCurves(run.output_dir)))
    except OSError:
        return {}


def _rewards(scores: dict[int, dict[str, Any]], saved: Saved) -> str:
    found = scores.get(saved.step, {}).items()
    means = [f"{environment} {one['reward']['mean']:.3f}" for environment, one in found if "reward" in one]
    return ", ".join(means)


def _checkpoints(run: Run, chosen: argparse.Namespace) -> int:
    if run.kind == "eval":
        results = run.output_dir / "results.jsonl"
        return fail(
            f"{run.id} is an evaluation, which trains nothing and saves no checkpoints; its results are in {results}",
            title="No checkpoints",
        )
    if run.kind == served.KIND:
        return fail(
            f"{run.id} serves training clients; what they have saved is in {run.output_dir / 'states'}",
            title="No checkpoints",
        )
    from primerl.stores.choice import store_of_run
    from primerl.stores.entries import StoreError

    found = local_checkpoints(run.output_dir)
    problem = None
    try:
        store = store_of_run(run.config)
        found += [] if store is None else store.saved(run.id)
    except StoreError as error:
        problem = str(error)
    found = [saved for saved in found if chosen.status in (None, _status(saved))]
    scores = _scores(run)
    if chosen.json:
        print(json.dumps([{**asdict(saved), "scores": scores.get(saved.step, {})} for saved in found], indent=2))
    elif found:
        rows = [
            [s.step, s.kind, _status(s), size(s.bytes), "yes" if s.weights_only else "", _rewards(scores, s), s.at]
            for s in found
        ]
        show(["step", "what", "status", "size", "weights only", "rewards", "id or folder"], rows, right=(0, 3))
        for name, reason in _failed(run).items():
            print(f"{name} is not stored yet: {reason}")
    elif chosen.status is not None and problem is None:
        print(f"nothing that {run.id} has saved is {chosen.status}")
    elif problem is None and run.output_dir.is_dir():
        print(f"{run.id} has saved nothing yet; `ckpt.interval` says after how many steps it does")
    if not chosen.json and problem is None and (said := gone(run)) is not None:
        print(said)
    return 0 if problem is None else fail(problem, title="The store cannot be read")
