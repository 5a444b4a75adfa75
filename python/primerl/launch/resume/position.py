"""How far a run has come: whether it is over when its processes have ended well, and what a start does again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl._core import PrimerlError, inspect_run
from primerl.runs import served
from primerl.train.checkpoint.files import last_line
from primerl.train.checkpoint.step_folders import saved_steps

if TYPE_CHECKING:
    from primerl.config.schema.trainer import Checkpoints


def trained_steps(folder: Path) -> int:
    return int(last_metrics(folder).get("step", 0))


def last_metrics(folder: Path) -> dict[str, Any]:
    """Metrics of the last step the trainer has trained; complete once it has ended."""
    return last_line(folder / "metrics.jsonl")


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Reports of all that have ended; none of a file that cannot be read, of which others tell."""
    found: list[Any] = []
    with contextlib.suppress(OSError):
        # A run that was killed may have left half a last line.
        for line in (folder / "evals.jsonl").read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [report for report in found if isinstance(report, dict) and {"environment", "rollouts"} <= report.keys()]


def trained_again(folder: Path, ckpt: Checkpoints | None) -> str | None:
    """What the trainer does a second time for lack of a checkpoint; to be called before it starts."""
    steps = trained_steps(folder)
    if steps == 0 or any(folder.glob("checkpoints/step_*")):
        return None
    span = "step 1" if steps == 1 else f"steps 1 to {steps}"
    if ckpt is None or ckpt.interval is None:
        hint = "set ckpt.interval"
    else:
        hint = f"ckpt.interval is {ckpt.interval}; lower it"
    if ckpt is not None and ckpt.weights_only:
        hint = "ckpt.weights_only saves none; omit it"
    return f"no checkpoint: the trainer trains {span} again ({hint} to resume from where it was)"


def goes_on_from(folder: Path) -> str:
    """Where a run that was stopped begins again."""
    if (folder / "configs" / "eval.toml").is_file():
        return "with what is not measured yet"
    if (folder / served.FILE).is_file():
        return "with the states that its clients have saved"
    if saved := saved_steps(folder / "checkpoints"):
        return f"from the checkpoint of step {saved[-1]}"
    return "from step 1, for lack of a checkpoint" if trained_steps(folder) else "from its beginning"


def cut_short(folder: Path, max_steps: int, *, evaluates: bool) -> str | None:
    """What a stopped run lacks, or None where it is over.

    The exit codes do not tell: an orchestrator that is asked to stop ends with 0 as one that is through, and the
    trainer takes its word that there are no more batches.
    """
    steps = trained_steps(folder)
    if steps < max_steps:
        return f"the orchestrator was stopped at step {steps} of {max_steps}; the same command resumes it"
    if not evaluates:
        return None
    try:
        # A request to stop is not in the journal, so what it calls the end is one.
        over = inspect_run(folder)["finished"] is not None
    except PrimerlError as error:
        return f"whether the last evaluation was done is unknown: {error}"
    if over:
        return None
    return f"the orchestrator was stopped after step {steps}, before the last evaluation; the same command resumes it"
