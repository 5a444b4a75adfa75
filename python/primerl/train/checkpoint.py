"""What a trainer leaves on disk: the state it goes on from, and the model folder a run ends with."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from primerl.train.files import whole_folder
from primerl.train.merging import merged_state

if TYPE_CHECKING:
    from primerl.train.lora import Adapter

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


ADAPTER_FOLDER = "lora_adapters"
"""In a model folder: the adapter that is merged into the model there, in peft's layout."""
STATE_FILE = Path("trainer") / "state.pt"
FORMER_STATE_FILE = Path("state.pt")
"""Where it was before checkpoints had a folder for each part of a run."""


@dataclass(frozen=True)
class TrainerState:
    """Everything that step `step` leaves to the next: with the same batches, training goes on as if never stopped."""

    step: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    tokens_seen: int
    samples_seen: int
    rng: dict[str, Any] = field(default_factory=dict)
    """States of torch's generators."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where supervised fine-tuning is in its data; the policy trainer's batches are the orchestrator's."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """Of a model with an adapter, which is then all that `model` holds: what it belongs to."""


class CheckpointError(Exception):
    """A checkpoint cannot be read. The message names the file and what to do."""


class Checkpoints:
    """`<output_dir>/checkpoints/step_<k>/trainer/state.pt`. A folder of that name is whole: it is written under
    another one, synced and renamed."""

    def __init__(self, output_dir: Path, keep_last: int | None, keep_interval: int | None = None) -> None:
        self._folder = output_dir / "checkpoints"
        self._keep_last = keep_last
        self._keep_interval = keep_interval

    def newest(self) -> TrainerState | None:
        """None where there is none. Raises CheckpointError when it cannot be read."""
        steps = self.steps()
        return self.load(steps[-1]) if steps else None

    def load(self, step: int) -> TrainerState:
        """Raises CheckpointError when it is not there or cannot be read."""
        folder = self._folder / f"step_{step}"
        if not folder.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self._folder}; steps there: {there}")
        path = folder / STATE_FILE
        if not path.exists():
            path = folder / FORMER_STATE_FILE
        try:
            return TrainerState(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); delete {folder} to go on from the checkpoint before it"
            ) from error

    def save(self, state: TrainerState) -> Path:
        """Whole or not at all."""
        remove_unfinished(self._folder)
        target = self._folder / f"step_{state.step}"
        with whole_folder(target, replace=True) as folder:
            (folder / STATE_FILE).parent.mkdir()
            torch.save(vars(state), folder / STATE_FILE)
        keep_newest(self._folder, self._keep_last, self._keep_interval)
        return target

    def steps(self) -> list[int]:
        """Of all that are there, ascending."""
        return saved_steps(self._folder)


def saved_steps(folder: Path) -> list[int]:
    """Steps of the folders `step_<k>` in `folder`, ascending."""
    paths = folder.iterdir() if folder.is_dir() else []
    matches = (re.fullmatch(r"step_(\d+)", path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def keep_newest(folder: Path, keep_last: int | None, keep_interval: int | None) -> None:
    """Remove the folders `step_<k>` but the newest `keep_last` (all where None), those at multiples of
    `keep_interval`, and step 0: what a run began with."""
    if keep_last is None:
        return
    for step in saved_steps(folder)[:-keep_last]:
        if step and (keep_interval is None or step % keep_interval):
            path = folder / f"step_{step}"
            # Under another name first: one that is half removed is none.
            gone = folder / f".{path.name}.{os.getpid()}.gone"
            path.rename(gone)
            shutil.rmtree(gone)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename what was saved after `step`, from which another run of steps begins; returns the new names."""
    renamed = []
    for later in saved_steps(folder):
        if later > step:
            path = folder / f"replaced_step_{later}"
            shutil.rmtree(path, ignore_errors=True)
            renamed.append((folder / f"step_{later}").rename(path))
    return renamed


def remove_unfinished(folder: Path) -> None:
    """What a process that was killed was writing or removing there. Nobody else may be at it."""
    for path in folder.glob(".step_*") if folder.is_dir() else []:
        shutil.rmtree(path)


def random_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def save_checkpoint(model: Any, source: Path, output_dir: Path, step: int, adapter: Adapter | None = None) -> Path:
    """Write `<output_dir>/weights/step_<step>`, which loads in `transformers`, vLLM and the embedded engine like any
    other model folder; returns it. One that is there is replaced. `adapter` is saved separately, in `lora_adapters`.

    Tokenizer, chat template and generation config are copied from the model folder `source`, byte for byte: saving
    them through `transformers` may change them, and with them the tokens of every later run.
    """
    target = output_dir / "weights" / f"step_{step}"
    with whole_folder(target, replace=True) as folder:
        model.save_pretrained(folder, state_dict=merged_state(model))
        if adapter is not None:
            adapter.save(folder / ADAPTER_FOLDER)
        for name in TEXT_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / "chat_templates").is_dir():
            shutil.copytree(source / "chat_templates", folder / "chat_templates")
    return target
