"""What a trainer leaves on disk: the state it goes on from, and the model folder a run ends with."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from primerl.train.files import whole_folder

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Everything of a model folder that turns text into tokens, and the rules of ending a turn."""


STATE_FILE = "state.pt"


@dataclass(frozen=True)
class TrainerState:
    """Everything that step `step` leaves to the next: with the same batches, training goes on as if never stopped."""

    step: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    tokens_seen: int
    samples_seen: int


class CheckpointError(Exception):
    """A checkpoint cannot be read. The message names the file and what to do."""


class Checkpoints:
    """`<output_dir>/checkpoints/step_<k>/state.pt`, the newest `keep_last` of them."""

    def __init__(self, output_dir: Path, keep_last: int) -> None:
        self._folder = output_dir / "checkpoints"
        self._keep_last = keep_last

    def newest(self) -> TrainerState | None:
        """None where there is none. Raises CheckpointError when it cannot be read."""
        steps = self._steps()
        if not steps:
            return None
        path = self._path(steps[-1]) / STATE_FILE
        try:
            return TrainerState(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); delete {path.parent} to go on from the checkpoint before it"
            ) from error

    def save(self, state: TrainerState) -> Path:
        """Whole or not at all."""
        target = self._path(state.step)
        with whole_folder(target, replace=True) as folder:
            torch.save(vars(state), folder / STATE_FILE)
        for step in self._steps()[: -self._keep_last]:
            shutil.rmtree(self._path(step))
        return target

    def _steps(self) -> list[int]:
        paths = self._folder.iterdir() if self._folder.is_dir() else []
        matches = (re.fullmatch(r"step_(\d+)", path.name) for path in paths)
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"


def save_checkpoint(model: Any, source: Path, output_dir: Path, step: int) -> Path:
    """Write `<output_dir>/weights/step_<step>`, which loads in `transformers`, vLLM and the embedded engine like any
    other model folder; returns it. One that is there is replaced.

    Tokenizer, chat template and generation config are copied from the model folder `source`, byte for byte: saving
    them through `transformers` may change them, and with them the tokens of every later run.
    """
    target = output_dir / "weights" / f"step_{step}"
    with whole_folder(target, replace=True) as folder:
        model.save_pretrained(folder)
        for name in TEXT_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / "chat_templates").is_dir():
            shutil.copytree(source / "chat_templates", folder / "chat_templates")
    return target
