"""`ckpt.resume_step`: a run goes back to an earlier checkpoint, or is refused before it has changed.

The orchestrator goes back first, to its part of the checkpoint, and sets aside what came after it: its journal and
batches, evaluations, later checkpoints and model folders. So the trainer finds that checkpoint as the newest. A run
that has lost its journal goes back to its newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import run_file
from primerl.config.schema.rl import RLConfig
from primerl.launch.supervise.failures import RefusedError
from primerl.train.checkpoint.step_folders import ORCHESTRATOR_FOLDER, SCRIPT_FOLDER, saved_steps

KEY = "ckpt.resume_step"


def wanted(config: RLConfig) -> int | None:
    """The step that is named; None for the newest."""
    ckpt = config.trainer.ckpt
    return None if ckpt is None else ckpt.goes_back_to


def whole_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that hold the orchestrator's part as well."""
    checkpoints = folder / "checkpoints"
    return [step for step in saved_steps(checkpoints) if _has_state(checkpoints, step)]


def needed(config: RLConfig, folder: Path) -> int | None:
    """The step to go back to; None where the run continues from its newest checkpoint."""
    step = wanted(config)
    if not holds_run(folder):
        # It was fetched from a store, say.
        return step if step is not None else next(reversed(whole_steps(folder)), None)
    there = saved_steps(folder / "checkpoints")
    return None if there and step == there[-1] else step


def flags(config: RLConfig, folder: Path) -> list[str]:
    """Flags of the orchestrator's first start, which sets a journal aside (there has to be one, even if empty) and
    skips an event."""
    skipped = [] if config.skip_event is None else ["--skip-event", str(config.skip_event)]
    step = needed(config, folder)
    if step is None:
        return skipped
    (folder / "journal").mkdir(exist_ok=True)
    return ["--resume-step", str(step), *skipped]


def check(config: RLConfig, folder: Path) -> None:
    """Raises ConfigError where there is no such checkpoint, or no state of the run next to it."""
    step, checkpoints = wanted(config), folder / "checkpoints"
    there = saved_steps(checkpoints)
    if step is not None and step not in there:
        raise ConfigError.at(
            KEY, f"there is no checkpoint of step {step} in {checkpoints}; there are: {_listed(there)}"
        )
    back = needed(config, folder)
    if back is not None and not _has_state(checkpoints, back):
        newest = {there[-1]} if holds_run(folder) else set()
        can = sorted({*whole_steps(folder), *newest})
        raise ConfigError(
            f"{KEY} is {back}, but the orchestrator saved no state with the trainer's checkpoint of that step; steps "
            f"with both{', and the newest' if newest else ''}: {_listed(can)}",
            KEY,
        )


def check_trainer(config: RLConfig, folder: Path) -> None:
    """Raises ConfigError where a training script has saved the checkpoint to resume from, and the run is started with a
    trainer of its own."""
    step, there = wanted(config), saved_steps(folder / "checkpoints")
    if not there or config.clean_output_dir or config.trainer.external:
        return
    checkpoint = folder / "checkpoints" / f"step_{step if step in there else there[-1]}"
    if (checkpoint / SCRIPT_FOLDER).is_dir():
        raise ConfigError.at(
            "trainer.external",
            f"{checkpoint} was saved by a training script, which alone can resume from it; start the "
            "run with --trainer external and the script with primerl.connect (one with primerl.Run needs no other "
            "command), or give another output_dir",
        )


def holds_run(folder: Path) -> bool:
    """Whether a run has begun there, which the same command continues."""
    return any(file.stem.isdigit() for file in folder.glob("journal/*.snapshot"))


def _has_state(checkpoints: Path, step: int | None) -> bool:
    return any((checkpoints / f"step_{step}" / ORCHESTRATOR_FOLDER).glob("*.snapshot"))


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def check_steps(config: RLConfig, status: dict[str, Any]) -> None:
    """Raises RefusedError where the run has cut the batches of more steps than it is to have now: its trainer would end
    before the orchestrator is done. `status`: of the orchestrator, empty where it is not known."""
    cut = int(status.get("run", {}).get("max_steps", 0))
    if cut > config.max_steps:
        raise RefusedError(
            f"max_steps is {config.max_steps}, but the batches of {cut} steps are cut already, which cannot be undone; "
            f"set it to {cut} or more, or start over with --clean-output-dir",
            "max_steps",
        )


def same_command(config: RLConfig) -> str:
    """What the user has to enter again: without what was asked of one start only."""
    ckpt = config.trainer.ckpt
    goes_back = ckpt is not None and ckpt.resume_step not in (None, -1)
    given = {
        "--clean-output-dir": config.clean_output_dir,
        "ckpt.resume_step": goes_back,
        "skip_event": config.skip_event is not None,
    }
    but = " and ".join(name for name, is_given in given.items() if is_given)
    same = run_file.with_folder("the same command", config)
    return f"{same} without {but}" if but else same
