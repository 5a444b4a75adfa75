"""Saved states of training clients: `<output_dir>/states/<model id>/<kind>/<name>`, in peft's layout, with the
optimizer's state where it was asked for. Whole or not there; checksums are verified before anything is loaded."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from primerl.tinker.clients import LoraOptions, TrainingClient
from primerl.tinker.losses import LossInputError, NotFoundError
from primerl.train.adapters.files import ADAPTER_CONFIG, ADAPTER_FILE, BASE_DIGEST, base_digest
from primerl.train.checkpoint.files import whole_folder, write_text
from primerl.train.checkpoint.proof import damaged, write_sums
from primerl.train.checkpoint.step_folders import saving

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
TYPES = {WEIGHTS: "training", SAMPLER: "sampler", EXTERNAL: "external"}
PEFT_FILES = (ADAPTER_CONFIG, ADAPTER_FILE)
"""Files of an exported adapter, which peft loads."""
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,200}")
FORMER = re.compile(r"\.(.+)\.\d+\.former")
"""Name of a state that was about to be replaced (`checkpoint.files.settle`)."""
LONGEST_TTL_S = 10 * 365 * 86_400.0
FACTS, STATE = "primerl.json", "optimizer.pt"
EXPIRY = "expiry.json"
"""Replaces the expiry in the facts, where it was set again; in no checksum, so that it can be."""


@dataclass(frozen=True)
class Facts:
    """What is known of a state without its tensors."""

    model_id: str
    kind: str
    name: str
    base_model: str
    options: LoraOptions
    saved: float
    """Seconds since 1970."""
    expires: float | None
    user_metadata: Any
    has_optimizer: bool
    alpha: float = 32.0
    """The adapter is scaled by alpha / rank."""
    steps: int | None = None
    """Optimizer steps until it was saved; None where the state does not say."""

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": TYPES[self.kind],
            "time": datetime.fromtimestamp(self.saved, UTC).isoformat(),
            "tinker_path": self.path,
            "size_bytes": None,
            "expires_at": None if self.expires is None else datetime.fromtimestamp(self.expires, UTC).isoformat(),
        }


class Store:
    """Files are read by any thread; the one that computes writes them."""

    def __init__(self, folder: Path, digest: str, alpha: float) -> None:
        """`digest`: of the base model, which states belong to. `alpha`: of this server's adapters."""
        self._folder = folder
        self._digest = digest
        self._alpha = alpha

    def clean(self) -> None:
        """Remove what a killed server was writing or deleting, and restore what it was replacing. No one else may be
        using the folder."""
        for unfinished in self._folder.glob("*/*/.*"):
            replaced = FORMER.fullmatch(unfinished.name)
            if replaced is not None and not (state := unfinished.with_name(replaced[1])).exists():
                unfinished.rename(state)
            else:
                shutil.rmtree(unfinished, ignore_errors=True)

    def save(
        self,
        client: TrainingClient,
        model_id: str,
        kind: str,
        name: str,
        *,
        base_model: str,
        ttl_s: float | None,
        overwrite: bool,
        user_metadata: Any,
    ) -> Facts:
        """On disk when this returns. Raises LossInputError; SavingError where it cannot be written."""
        if not NAME.fullmatch(name):
            raise LossInputError(
                f"the name {name!r} cannot be used: give letters, digits, dots, dashes and underscores"
            )
        expires = _expiry(ttl_s)
        target = self._folder_of(model_id, kind, name)
        now = time.time()
        if target.exists() and not overwrite and self._is_kept(target, now):
            raise LossInputError(f"{SCHEME}{model_id}/{kind}/{name} exists; give another name, or overwrite=True")
        has_optimizer = kind == WEIGHTS
        facts = Facts(
            model_id,
            kind,
            name,
            base_model,
            client.options,
            now,
            expires,
            user_metadata,
            has_optimizer,
            self._alpha,
            client.steps,
        )
        with saving(target), whole_folder(target, replace=True) as folder:
            client.adapter.write(folder, client.adapter.tensors())
            if has_optimizer:
                torch.save(client.state(), folder / STATE)
            (folder / FACTS).write_text(json.dumps(asdict(facts)) + "\n", encoding="utf-8")
            write_sums(folder)
        return facts

    def load(self, path: str) -> tuple[Facts, dict[str, Tensor], dict[str, Any] | None]:
        """The tensors of an adapter, and the optimizer's state where it was saved. Raises LossInputError."""
        folder = self._found(path)
        try:
            bad = damaged(folder)
            if bad:
                raise LossInputError(
                    f"{path} is damaged on the server's disk: {', '.join(bad)} is not what was written"
                )
            facts = _facts(folder)
            tensors = load_file(folder / ADAPTER_FILE)
            state = None
            if facts.has_optimizer:
                state = dict(torch.load(folder / STATE, map_location="cpu", weights_only=True))
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, LossInputError):
                raise
            raise LossInputError(f"{path} cannot be read on the server's disk: {error}") from error
        if facts.alpha != self._alpha:
            raise LossInputError(
                f"{path} was trained with trainer.lora_alpha = {facts.alpha:g}, and this server's is {self._alpha:g}: "
                "its layers would be scaled otherwise"
            )
        if base_digest(folder / ADAPTER_FILE) != self._digest:
            raise LossInputError(f"{path} was trained on other weights than this server's base model ({BASE_DIGEST})")
        return facts, tensors, state

    def expire(self, path: str, ttl_s: float | None) -> None:
        """Sets when a state expires; None: never. Raises LossInputError; SavingError where it cannot be written."""
        file = self._found(path) / EXPIRY
        expires = _expiry(ttl_s)
        with saving(file):
            write_text(file, json.dumps({"expires": expires}) + "\n")

    def exported(self, path: str) -> Path:
        """The folder of an exported adapter, which holds `PEFT_FILES`. Raises LossInputError."""
        folder = self._found(path)
        if folder.parent.name != EXTERNAL:
            raise LossInputError(f"{path} is no exported adapter; save_weights_external makes one")
        return folder

    def facts(self, path: str) -> Facts:
        """Raises LossInputError."""
        return _facts(self._found(path))

    def all(self, model_id: str | None = None) -> list[Facts]:
        """Those that can be read and have not expired, the newest first; what has expired is deleted."""
        found, now = [], time.time()
        for file in self._folder.glob(f"*/*/[!.]*/{FACTS}"):
            try:
                one = _facts(file.parent)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged: `load` says so
            if one.expires is not None and one.expires < now:
                shutil.rmtree(file.parent, ignore_errors=True)
            elif model_id in (None, one.model_id):
                found.append(one)
        return sorted(found, key=lambda one: -one.saved)

    def delete(self, path: str) -> None:
        """Raises LossInputError."""
        folder = self._found(path)
        gone = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)

    def _found(self, path: str) -> Path:
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and len(parts) == 3 and parts[1] in TYPES:
            model_id, kind, name = parts
            if MODEL_ID.fullmatch(model_id) and NAME.fullmatch(name):
                folder = self._folder_of(model_id, kind, name)
                if self._is_kept(folder, time.time()):
                    return folder
        raise NotFoundError(f"there is no saved state {path!r} on this server")

    def _is_kept(self, folder: Path, now: float) -> bool:
        try:
            expires = _facts(folder).expires
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            return True
        return expires is None or expires >= now

    def _folder_of(self, model_id: str, kind: str, name: str) -> Path:
        assert MODEL_ID.fullmatch(model_id), model_id
        return self._folder / model_id / kind / name


def _expiry(ttl_s: float | None) -> float | None:
    """Raises LossInputError."""
    if ttl_s is None:
        return None
    if not 0 < ttl_s <= LONGEST_TTL_S:
        raise LossInputError(f"ttl_seconds is {ttl_s:g}; give a time of at most ten years, or none")
    return time.time() + ttl_s


def _facts(folder: Path) -> Facts:
    values = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    with contextlib.suppress(FileNotFoundError):
        values |= json.loads((folder / EXPIRY).read_text(encoding="utf-8"))
    return Facts(**{**values, "options": LoraOptions(**values["options"])})
