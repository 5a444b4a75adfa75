"""Proves before a checkpoint is resumed that it belongs to this model and that its files are unchanged."""

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
"""Keys of a model's config that do not affect what it computes."""


def model_facts(model: Any) -> dict[str, Any]:
    """The model's config as plain values; empty for a module without one."""
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
    """How the saved model differs, for messages; None if it does not, or if that is unknown. Keys that only one of the
    two has come from another version of transformers."""
    other = [name for name in sorted(saved.keys() & own.keys()) if saved[name] != own[name]]
    told = [f"{name} is {own[name]}, and there {saved[name]}" for name in other[:3]]
    return "; ".join(told) or None


def write_sums(folder: Path) -> None:
    """Write checksums of all files in it."""
    sums = {str(path.relative_to(folder)): _sum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_text(folder / SUMS, json.dumps(sums, indent=0) + "\n")


def damaged(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Damaged files among every `parts`-th file.

    Raises OSError or ValueError if they cannot be checked."""
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
