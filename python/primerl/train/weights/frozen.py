"""What a model's folder has and the trainer does not load: vision towers of models that are trained on text, and layers
that predict further tokens (MTP). It stays as it is: it is taken from the folder that training started from.

    note_frozen(model, folder)     when the model is loaded
    Frozen.entries()               in every manifest, so that an engine which holds them proves its own, once
    Frozen.tensors()               copied into every saved model folder
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from primerl.train.weights.names import note_names

log = logging.getLogger(__name__)

ATTRIBUTE = "primerl_frozen"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPUTED = "rotary_emb.inv_freq"
"""Computed, not trained; old checkpoints of Llama have them."""
KINDS = {
    "vision tower": re.compile(r"(?:^|\.)(?:visual|vision_\w+|multi_modal_projector|mm_projector)\."),
    "audio tower": re.compile(r"(?:^|\.)(?:audio_\w+|speech_\w+|talker|token2wav)\."),
    "layers that predict further tokens (MTP)": re.compile(r"(?:^|\.)(?:mtp\w*|layers\.\d+)\."),
}


@dataclass
class Frozen:
    folder: Path
    names: tuple[str, ...]
    """Sorted."""
    _entries: list[dict[str, Any]] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By name, views of the mapped files. Raises OSError or SafetensorError where the folder is gone."""
        with ExitStack() as opened:
            files = [opened.enter_context(safe_open(file, "pt")) for file in weight_files(self.folder)]
            holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
            for name in self.names:
                yield name, holders[name].get_tensor(name)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def parameters(self) -> int:
        return sum(tensor.numel() for _, tensor in self.tensors())

    def entries(self) -> list[dict[str, Any]]:
        """For a manifest: name, dtype, shape and hash of each. The hashes are computed once."""
        from primerl.train.weights.tensors import NAMES, tensor_hash  # needs xxhash, which a step does without

        if not self._entries:
            self._entries = [
                {
                    "name": name,
                    "dtype": NAMES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "xxh3": tensor_hash(tensor),
                }
                for name, tensor in self.tensors()
            ]
        return self._entries


def weight_files(folder: Path) -> list[Path]:
    """The files that `transformers` loads; a folder may hold the weights in another layout too."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(named))]
    return sorted(folder.glob("*.safetensors"))


def names_in(folder: Path) -> list[str]:
    """Names of the tensors in a model folder."""
    found: list[str] = []
    for file in weight_files(folder):
        with safe_open(file, "pt") as content:
            found.extend(content.keys())
    return sorted(found)


def note_frozen(model: Any, folder: Path) -> None:
    """Leaves with the model which tensors of its folder it does not hold. Leaves nothing if it holds all of them."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    absent = note_names(model, names_in(folder))
    names = tuple(name for name in absent if not name.endswith(COMPUTED) and name not in tied)
    if names:
        setattr(model, ATTRIBUTE, Frozen(folder, names))
        log.info("%s", described(names))


def frozen_of(model: Any) -> Frozen | None:
    return getattr(model, ATTRIBUTE, None)


def described(names: Iterable[str]) -> str:
    """One line about them."""
    counts = Counter(_kind(name) for name in names)
    listed = ", ".join(f"{kind}: {count} tensors" for kind, count in counts.items())
    return f"not trained, and kept as the model's folder has it ({listed})"


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), f"others, such as {name}")
