"""What a run has saved in its own folder: checkpoints to resume from, model folders, adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from primerl.train.adapters.files import ADAPTER_FOLDER

STEP = re.compile(r"(\.?)(step|replaced_step)_(\d+)")


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    kind: str
    """`checkpoint`: what the trainer resumes from; `weights`: a model folder; `adapter`."""
    ready: bool
    """Whether it is complete."""
    bytes: int
    weights_only: bool
    """Whether a run cannot resume from it, only start with it."""
    at: str
    """Folder, or the id in the store."""


def local_checkpoints(output_dir: Path) -> list[Saved]:
    """By step. Folders that are being written have another name until they are whole."""
    found = []
    for kind, name in (("checkpoint", "checkpoints"), ("weights", "weights")):
        for folder, step, ready in _steps(output_dir / name):
            ready = ready and _is_whole(folder, kind)
            found.append(Saved(step, kind, ready, size_of(folder), kind == "weights", str(folder)))
            adapter = folder / ADAPTER_FOLDER
            if adapter.is_dir():
                whole = ready and (adapter / "adapter_config.json").is_file()
                found.append(Saved(step, "adapter", whole, size_of(adapter), True, str(adapter)))
    return sorted(found, key=lambda saved: (saved.step, saved.kind))


def size_of(folder: Path) -> int:
    """Bytes of all files below; those that vanish meanwhile count nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _steps(folder: Path) -> Iterator[tuple[Path, int, bool]]:
    """Folder, step, and whether it has its last name."""
    for path in folder.iterdir() if folder.is_dir() else []:
        match = STEP.match(path.name)
        if match and path.is_dir() and not path.name.endswith(".gone"):
            yield path, int(match[3]), not match[1]


def _is_whole(folder: Path, kind: str) -> bool:
    if kind == "checkpoint":
        return any((folder / part / "state.pt").is_file() for part in ("trainer", "script", "."))
    from primerl.config.errors.fail import ConfigError
    from primerl.launch.preflight.model_folder import check_weights

    files = sorted(folder.glob("*.safetensors"))
    try:
        for file in files:
            check_weights(file)
    except ConfigError:
        return False
    return bool(files) and (folder / "config.json").is_file()
