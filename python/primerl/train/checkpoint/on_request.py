"""A checkpoint that the launcher asks for, out of turn: a file in the run's folder. Standard library only.

The leading rank looks for it after every step, and the others do as it does. A file, because ranks may be on other
machines, where no signal reaches them alone.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path("run") / "save_checkpoint"


def ask(folder: Path) -> None:
    (folder / FILE).touch()


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def is_asked(folder: Path) -> bool:
    return (folder / FILE).exists()
