"""A checkpoint that the launcher asks for, out of turn: a file in the run's folder. Standard library only.

The leading rank looks for it after every step, and the others do as it does. A file, because ranks may be on other
machines, where no signal reaches them alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Saves(Protocol):
    @property
    def weights_only(self) -> bool: ...


class Agrees(Protocol):
    @property
    def leads(self) -> bool: ...
    def agree(self, value: Any) -> Any: ...


FILE = Path("run") / "save_checkpoint"


def ask(folder: Path) -> None:
    (folder / FILE).touch()


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def is_wanted(folder: Path, ckpt: Saves | None, ranks: Agrees) -> bool:
    """Whether a checkpoint is to be saved after this step: the same on all ranks, which have to call it together.
    `ckpt`: the run's settings; without, or where only weights are saved, it is never."""
    if ckpt is None or ckpt.weights_only:
        return False
    return bool(ranks.agree(ranks.leads and (folder / FILE).exists()))
