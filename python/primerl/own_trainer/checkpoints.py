"""Checkpoints of a training script: `<output_dir>/checkpoints/step_<k>/script/state.pt`, with the orchestrator's part
in the same folder, as of a run's own trainer. Whole or not there; checksums are verified before anything is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from primerl.train.checkpoint.files import whole_folder
from primerl.train.checkpoint.proof import SUMS, damaged, write_sums
from primerl.train.checkpoint.state import CheckpointError
from primerl.train.checkpoint.step_folders import (
    ORCHESTRATOR_FOLDER,
    SCRIPT_FOLDER,
    keep_newest,
    remove_unfinished,
    saved_steps,
    saving,
)

STATE_FILE = Path(SCRIPT_FOLDER) / "state.pt"


class ScriptCheckpoints:
    def __init__(self, output_dir: Path, keep_last: int, keep_interval: int | None) -> None:
        self._folder = output_dir / "checkpoints"
        self._kept = (keep_last, keep_interval)
        self._keep_last = keep_last

    def save(self, step: int, state: Mapping[str, Any]) -> int:
        """Write the checkpoint of `step`, and remove those that are not to be kept. Returns the oldest of the newest
        that are: batches up to there are no longer needed.

        Raises SavingError: it cannot be written, as on a full disk; earlier ones are still there.
        """
        target = self._folder / f"step_{step}"
        with saving(target):
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)
            with whole_folder(target, replace=True) as folder:
                file = folder / STATE_FILE
                file.parent.mkdir()
                (folder / ORCHESTRATOR_FOLDER).mkdir()
                torch.save(dict(state), file)
                write_sums(folder)
            keep_newest(self._folder, *self._kept)
        return saved_steps(self._folder)[-self._keep_last :][0]

    def load(self, device: str | torch.device) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest one; None if there is none.

        Raises CheckpointError: it is damaged, or of a run's own trainer.
        """
        steps = saved_steps(self._folder)
        if not steps:
            return None
        folder = self._folder / f"step_{steps[-1]}"
        if not (folder / SCRIPT_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} was not saved by a training script, so a script cannot resume from it: give another "
                "output_dir"
            )
        hint = f"delete {folder} to resume from the checkpoint before it"
        try:
            bad = damaged(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / SUMS} cannot be read ({error}); {hint}") from error
        if bad:
            raise CheckpointError(f"{folder} is not what was written: {', '.join(bad)}; {hint}")
        try:
            return steps[-1], dict(torch.load(folder / STATE_FILE, map_location=device, weights_only=True))
        except Exception as error:
            raise CheckpointError(f"{folder / STATE_FILE} cannot be read ({error}); {hint}") from error
