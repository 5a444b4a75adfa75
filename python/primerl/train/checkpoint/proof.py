"""Before a checkpoint is taken up: it is of this model, and on the disk is what was there when it was completed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from primerl.train.checkpoint.files import write_text

SUMS = "sums.json"
"""In a checkpoint's folder: XXH3-64 of each of its files, by its path there, 16 hex digits."""
BLOCK_BYTES = 2**24
NOT_OF_THE_MODEL = {"transformers_version", "dtype", "architectures", "use_cache", "_name_or_path"}
"""Keys of a model's config that are not about what it computes."""


def model_facts(model: Any) -> dict[str, Any]:
    """The model's config, as plain values; nothing of a module that has none."""
    if not hasattr(model, "config"):
        return {}
    facts: dict[str, Any] = _without(json.loads(json.dumps(model.config.to_dict(), default=str)))
    return facts


def _without(value: Any) -> Any:
    """Parts of a model have configs of their own."""
    if isinstance(value, dict):
        return {name: _without(item) for name, item in value.items() if name not in NOT_OF_THE_MODEL}
    return [_without(item) for item in value] if isinstance(value, list) else value


def other_facts(saved: dict[str, Any], own: dict[str, Any]) -> str | None:
    """How the model that was saved differs, for people; None where it does not, or where that is not known. Keys that
    one of the two has not are those of another version of transformers."""
    other = [name for name in sorted(saved.keys() & own.keys()) if saved[name] != own[name]]
    told = [f"{name} is {own[name]}, and there {saved[name]}" for name in other[:3]]
    return "; ".join(told) or None


def write_sums(folder: Path) -> None:
    """Write checksums of all files in it."""
    sums = {str(path.relative_to(folder)): _sum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_text(folder / SUMS, json.dumps(sums, indent=0) + "\n")


def damaged(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Files that are not what was written, of every `parts`-th file.

    Raises OSError or ValueError where that cannot be told."""
    sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
    if not isinstance(sums, dict) or not sums:
        raise ValueError(f"{SUMS} has no sums")
    return [name for name, expected in list(sums.items())[part::parts] if _sum(folder / name) != expected]


def _sum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
