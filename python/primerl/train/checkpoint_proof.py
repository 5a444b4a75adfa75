"""Before a checkpoint is taken up: it is of this model, and on the disk is what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from primerl.train.files import write_text

SUMS = "sums.json"
"""In a checkpoint's folder: XXH3-64 of each of its files, by its path there, 16 hex digits."""
BLOCK_BYTES = 2**24
NOT_OF_THE_MODEL = {"transformers_version", "dtype", "architectures", "use_cache", "_name_or_path"}
"""Keys of a model's config that are not about what it computes."""


def model_facts(model: Any) -> dict[str, Any]:
    """The model's config, as plain values; nothing of a module that has none."""
    if not hasattr(model, "config"):
        return {}
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    return {name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL}


def other_facts(saved: dict[str, Any], own: dict[str, Any]) -> str | None:
    """How the model that was saved differs, for people; None where it does not, or where that is not known."""
    if not saved:
        return None
    other = [name for name in sorted({*saved, *own}) if saved.get(name) != own.get(name)]
    told = [f"{name} is {own.get(name)}, and there {saved.get(name)}" for name in other[:3]]
    return "; ".join(told) or None


def write_sums(folder: Path) -> None:
    """Of all files in it."""
    sums = {str(path.relative_to(folder)): _sum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_text(folder / SUMS, json.dumps(sums, indent=0) + "\n")


def damaged(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Files that are not what was written, of every `parts`-th file. Older checkpoints have no sums.

    Raises OSError or ValueError where that cannot be told."""
    if not (folder / SUMS).is_file():
        return []
    sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
    return [name for name, expected in list(sums.items())[part::parts] if _sum(folder / name) != expected]


def _sum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
