"""What a manifest of the checkpoint store says, and by what a model is known there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from primerl.process.problems import ProblemError
from primerl.train.checkpoint.step_folders import ORCHESTRATOR_FOLDER

KINDS = ("checkpoint", "weights", "adapter")
SNAPSHOT = ".snapshot"
"""The orchestrator's part of a checkpoint is whole when it has one."""


class StoreError(ProblemError):
    """The store cannot be used, or what is asked for is not there. The message names it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a manifest says."""

    run: str
    kind: str
    step: int
    model: str
    """Digest of the config.json of the model that the run began with."""
    data: str
    """Folder of the files, in the store."""
    files: dict[str, dict[str, Any]]
    """By relative path: `bytes`, and `xxh3`: 32 hex digits."""
    stored: float
    """When it was stored; seconds since 1970. A run that went back stores lower steps later, and those are its
    newest."""
    base: str = ""
    """Digest of the weights of that model; empty in manifests of versions that did not compare them."""

    @classmethod
    def read(cls, text: str | bytes) -> Entry:
        """Raises ValueError, LookupError or TypeError for what is no manifest."""
        content = json.loads(text)
        return cls(**{name: content[name] for name in cls.__slots__ if name != "base"}, base=content.get("base", ""))

    def manifest(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__} | {"version": 1}, indent=1)

    @property
    def id(self) -> str:
        return f"{self.run}/{self.kind}/step_{self.step}"

    @property
    def bytes(self) -> int:
        return sum(int(facts["bytes"]) for facts in self.files.values())

    @property
    def goes_on(self) -> bool:
        """Whether a run can resume from it without a journal: it holds what the orchestrator was at that step."""
        parts = (name.partition("/") for name in self.files if name.endswith(SNAPSHOT))
        return self.kind == "checkpoint" and any(folder == ORCHESTRATOR_FOLDER for folder, _, _ in parts)


def newest(entry: Entry) -> tuple[float, int]:
    """A key to sort by: of what was stored within one tick of the clock, the higher step is the newer one."""
    return entry.stored, entry.step


def listed(entries: list[Entry]) -> str:
    """`checkpoints of steps 2, 4; weights of step 4`, for people."""
    words = {"checkpoint": "checkpoints", "weights": "weights", "adapter": "adapters"}
    steps = {kind: sorted(entry.step for entry in entries if entry.kind == kind) for kind in KINDS}
    told = (
        f"{words[kind]} of step{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
        for kind, found in steps.items()
        if found
    )
    return "; ".join(told) or "nothing of it"


def model_digest(folder: Path) -> str:
    """The part of a model folder's config.json that names its shape, whatever saved it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / 'config.json'} cannot be read: {error}") from None
    # Saving a model rewrites these.
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"):
        config.pop(name, None)
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode())


def weights_digest(folder: Path) -> str:
    """Digest of a model folder's weights, as they are in its files. Raises StoreError."""
    from primerl.train.adapters.files import folder_digest
    from primerl.train.settings import ConfigError

    try:
        return folder_digest(folder)
    except (ConfigError, OSError, ValueError) as error:
        raise StoreError(f"the weights in {folder} cannot be read: {error}") from None


def origin(folder: Path) -> Path:
    """The manifest next to a folder that was fetched."""
    return folder.with_name(f"{folder.name}.json")


def begun_with(folder: Path) -> tuple[str, str]:
    """Digests of config and weights of the model that a run begins with in `folder`; where that was fetched from a
    store, of the model that the run it comes from began with, which is `model.path` of both. Raises StoreError."""
    try:
        entry = Entry.read(origin(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError):
        return model_digest(folder), weights_digest(folder)
    return entry.model, entry.base
