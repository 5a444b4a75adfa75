"""A step whose numbers are not finite ends the run: what it trained on is named, and kept as it was."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from primerl.train.files import whole_folder

NAMED = 32
"""The rest is counted."""


class TrainingDiverged(Exception):  # noqa: N818 (what happened)
    """Loss, gradient or weights are not finite. The message names the step and, where they matter, what it trained."""


def listed(names: Iterable[object], separator: str = ", ") -> str:
    """`1, 2, 3 and 4 more`."""
    every = [str(name) for name in names]
    rest = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return separator.join(every[:NAMED]) + rest


def keep_batch(output_dir: Path, step: int, rank: int, file: str, content: bytes | bytearray) -> str:
    """For whoever looks for the reason; each rank keeps what it trained. Says where, or why it cannot be kept."""
    folder = output_dir / "diverged" / f"step_{step}_rank_{rank}"
    try:
        with whole_folder(folder, replace=True) as new:
            (new / file).write_bytes(content)
    except OSError as error:
        return f"the batch could not be kept: {error}"
    return f"the batch is in {folder / file}"
