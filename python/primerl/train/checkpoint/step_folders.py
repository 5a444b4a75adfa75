"""Lists, keeps and removes folders `step_<k>`, also those that a killed process has left behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

STATE_FILE = Path("trainer") / "state.pt"
"""In a checkpoint: what the trainer says of it."""
ORCHESTRATOR_FOLDER = "orchestrator"
"""In a checkpoint: the run's state, which the orchestrator writes when the checkpoint is reported."""
SCRIPT_FOLDER = "script"
"""In a checkpoint: what a training script has saved (`own_trainer/checkpoints.py`)."""
REPLACED = "replaced_step_"
"""Prefix of folders of later steps than the one a run was resumed from."""


class SavingError(Exception):
    """Something cannot be written to disk. The message names it and the system's error."""


@contextmanager
def saving(what: Path) -> Iterator[None]:
    """Turns write errors into a SavingError that names `what`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SavingError(f"{what} cannot be written: {error}") from error
    except RuntimeError as error:
        # torch.save reports a full disk like this.
        if not any(word in str(error) for word in ("inline_container", "PytorchStreamWriter")):
            raise
        raise SavingError(f"{what} cannot be written: {str(error).splitlines()[0]}") from error


def saved_steps(folder: Path) -> list[int]:
    """Steps of the folders `step_<k>` in `folder`, ascending."""
    return _steps(folder, "step_")


def _steps(folder: Path, prefix: str) -> list[int]:
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    # A run makes no `step_007`, which could not be found by its number.
    matches = (re.fullmatch(rf"{prefix}(0|[1-9]\d*)", path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def keep_newest(folder: Path, keep_last: int | None, keep_interval: int | None) -> None:
    """Remove the folders `step_<k>` but the newest `keep_last` (all where None), those at multiples of
    `keep_interval`, and step 0: what a run began with. The same of those that were set aside."""
    if keep_last is None:
        return
    for prefix in ("step_", REPLACED):
        for step in _steps(folder, prefix)[:-keep_last]:
            if not step or (keep_interval is not None and step % keep_interval == 0):
                continue
            remove_step(folder / f"{prefix}{step}")


def remove_step(path: Path) -> None:
    # Under another name first, so that a half removed folder is not taken for a step.
    gone = path.with_name(f".{path.name}.{os.getpid()}.gone")
    path.rename(gone)
    shutil.rmtree(gone)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename what was saved after `step`, from which the run starts over; returns the new names."""
    renamed = []
    for later in saved_steps(folder):
        if later > step:
            path = folder / f"{REPLACED}{later}"
            shutil.rmtree(path, ignore_errors=True)
            renamed.append((folder / f"step_{later}").rename(path))
    return renamed


def set_aside_later(output_dir: Path, step: int) -> list[Path]:
    """The same for checkpoints and weights of a run that goes back to `step`."""
    return [path for name in ("weights", "checkpoints") for path in set_aside_after(output_dir / name, step)]


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was writing or removing there. No one else may be writing it."""
    for path in [*folder.glob(".step_*"), *folder.glob(f".{REPLACED}*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
