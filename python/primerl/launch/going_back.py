"""`ckpt.resume_step`: a run goes back to an earlier checkpoint, or is refused before it has changed."""

from __future__ import annotations

import json
from pathlib import Path

from primerl.config.load import ConfigError
from primerl.config.resolve import write_text
from primerl.config.rl import RLConfig
from primerl.launch import status as orchestrator_status
from primerl.launch.starting import RefusedError
from primerl.train.client import OrchestratorClient, OrchestratorError
from primerl.train.step_folders import saved_steps, set_aside_later

KEY = "ckpt.resume_step"
ANSWER_S = 30.0
EVALUATIONS, REPLACED_EVALUATIONS = "evals.jsonl", "replaced_evals.jsonl"


def wanted(config: RLConfig) -> int | None:
    """The step that is named; None for the newest."""
    ckpt = config.trainer.ckpt
    return None if ckpt is None else ckpt.goes_back_to


def check(config: RLConfig, folder: Path) -> None:
    """Raises ConfigError where there is no such checkpoint. Whether its batches are there the orchestrator knows."""
    step = wanted(config)
    there = saved_steps(folder / "checkpoints")
    if step is not None and step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise ConfigError(
            f"{KEY}: there is no checkpoint of step {step} in {folder / 'checkpoints'}; there are: {listed}"
        )


def go_back(config: RLConfig, folder: Path, url: str | None) -> list[Path]:
    """With the orchestrator at `url` (None: it says that the run is over), and before the trainer is started. Returns
    what was set aside.

    Raises RefusedError, after which the run is as it was.
    """
    step = wanted(config)
    if step is None:
        return []
    if url is None:
        raise RefusedError(
            f"{KEY} is {step}, but the run in {folder} is over, and only one that is not can go back; leave it out, "
            "or begin anew from a model folder of it"
        )
    client = OrchestratorClient(url, ANSWER_S)
    try:
        client.resume(step)
    except OrchestratorError as error:
        there = ", ".join(map(str, saved_steps(folder / "checkpoints")))
        raise RefusedError(f"{KEY} is {step}, and there are checkpoints of steps {there}, but {error}") from None
    finally:
        client.close()
    aside = set_aside_later(folder, step)
    evaluations = set_aside_evaluations(folder, step)
    return [*aside, *([] if evaluations is None else [evaluations])]


def set_aside_evaluations(folder: Path, step: int) -> Path | None:
    """Moves the lines of `evals.jsonl` that are of later versions than `step` to a file of their own: they are of
    weights that the run has left. Returns the file; None where there is no such line.

    The file is written before they are taken out: a start that is killed in between moves them again.
    """
    file = folder / EVALUATIONS
    if not file.is_file():
        return None
    # What a kill has cut short at the end is the orchestrator's to mend.
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    left = [line for line in whole if _version(line) > step]
    if not left:
        return None
    replaced = folder / REPLACED_EVALUATIONS
    before = replaced.read_text() if replaced.is_file() else ""
    write_text(replaced, before + "".join(line for line in left if line not in before))
    write_text(file, "".join(line for line in whole if line not in left))
    return replaced


def _version(line: str) -> int:
    """The version that was measured, or that was newest when another model was; -1 where the line does not say it."""
    try:
        found = json.loads(line)
        return int(found["version"] if "version" in found else found["policy_at_the_time"])
    except (ValueError, LookupError, TypeError):
        return -1


def check_steps(config: RLConfig, url: str) -> None:
    """Raises RefusedError where the run has cut the batches of more steps than it is to have now: its trainer would end
    before the orchestrator is done."""
    status = orchestrator_status.fetch(url) or {}
    cut = int(status.get("run", {}).get("max_steps", 0))
    if cut > config.max_steps:
        raise RefusedError(
            f"max_steps is {config.max_steps}, but the batches of {cut} steps are cut already, which cannot be undone; "
            f"set it to {cut} or more, or begin anew with --clean-output-dir"
        )
