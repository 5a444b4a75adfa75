"""`primerl run rollouts`, `progress` and `distributions`: what was sampled in each step, as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from primerl.cli.arguments import count
from primerl.cli.run.common import add_json, natural, parser_of, with_run
from primerl.config.errors.fail import fail
from primerl.runs.registry import Run

TITLE = "Nothing to show"


class NoStepError(Exception):
    """The run has no such step; the message says which it has."""


def rollouts(arguments: list[str]) -> int:
    parser = parser_of(
        "rollouts", "Prints the rollouts of a step as one JSON object: environment, example, rewards, end."
    )
    parser.add_argument("-s", "--step", type=natural, required=True, metavar="N", help="the step")
    parser.add_argument("-p", "--page", type=count, default=1, metavar="N", help="page, counted from 1")
    parser.add_argument("-n", "--num", type=count, default=100, metavar="N", help="rollouts of a page (100)")
    return _told(parser, arguments, _rollouts)


def progress(arguments: list[str]) -> int:
    parser = parser_of("progress", "Prints which steps have rollouts, as one JSON object.")
    return _told(parser, arguments, _progress)


def distributions(arguments: list[str]) -> int:
    parser = parser_of("distributions", "Prints the histogram of a step's rewards as one JSON object.")
    parser.add_argument("-s", "--step", type=natural, metavar="N", help="the step (default: the last one)")
    parser.add_argument("-t", "--type", choices=("reward",), default="reward", help="what is counted")
    return _told(parser, arguments, _distributions)


def _told(parser: Any, arguments: list[str], ask: Any) -> int:
    from primerl._core import PrimerlError
    from primerl.process.redaction import redacted
    from primerl.runs.report import DamagedRunError

    add_json(parser, "print JSON, as it does anyway")

    def tell(run: Run, chosen: argparse.Namespace) -> int:
        if run.kind != "rl":
            return fail(
                f"{run.id} was started by `primerl {run.kind}`, which has no training steps with rollouts", title=TITLE
            )
        try:
            print(json.dumps(redacted(ask(run, chosen)), indent=2))
        except (NoStepError, DamagedRunError, PrimerlError) as error:
            return fail(str(error), title=TITLE)
        return 0

    return with_run(parser, arguments, tell, needs_folder=True)


def _rollouts(run: Run, chosen: argparse.Namespace) -> dict[str, Any]:
    samples = _samples(run, chosen.step)
    size = chosen.num
    begin = (chosen.page - 1) * size
    return {
        "run_id": run.id,
        "step": chosen.step,
        "samples": samples[begin : begin + size],
        "total": len(samples),
        "page": chosen.page,
        "limit": size,
        "total_pages": -(-len(samples) // size),
    }


def _progress(run: Run, _: argparse.Namespace) -> dict[str, Any]:
    from datetime import UTC, datetime

    steps = _steps(run)
    file = run.output_dir / "steps.jsonl"
    at = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat() if steps else None
    return {
        "latest_step": steps[-1] if steps else None,
        "steps_with_samples": steps,
        "steps_with_distributions": steps,
        "last_updated_at": at,
    }


def _distributions(run: Run, chosen: argparse.Namespace) -> dict[str, Any]:
    from primerl.monitors.monitor import Distribution

    steps = _steps(run)
    if chosen.step is None and not steps:
        raise NoStepError(f"{run.id} has cut no step yet")
    step = steps[-1] if chosen.step is None else chosen.step
    rewards = [reward for sample in _samples(run, step) for reward in sample["rewards"] if reward is not None]
    found = Distribution.of(rewards) if rewards else Distribution([], [])
    bins = [
        {"low": low, "high": high, "count": count}
        for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False)
    ]
    return {"step": step, "type": chosen.type, "bins": bins}


def _steps(run: Run) -> list[int]:
    """Those that were cut, in ascending order; one that was cut again after a restart counts once."""
    from primerl.runs.report import read_lines

    return sorted({line["step"] for line in read_lines(run.output_dir / "steps.jsonl")})


def _samples(run: Run, step: int) -> list[dict[str, Any]]:
    """The rollouts of a step's groups. Raises NoStepError."""
    from primerl._core import inspect_run

    steps = _steps(run)
    if step not in steps:
        known = f"it has {steps[0]} to {steps[-1]}" if steps else "it has cut none yet"
        raise NoStepError(f"{run.id} has no step {step}; {known}")
    answer = inspect_run(run.output_dir, "step", step)
    return [
        {"environment": group["environment"], "example": group["example"], "group": group["group"], **rollout}
        for group in answer["groups"]
        for rollout in group["rollouts"]
    ]
