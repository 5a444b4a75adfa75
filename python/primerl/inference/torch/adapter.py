"""An engine that is sent adapters: the model's own weights stay, each version's adapter is merged into a copy.

Merged, since a step's cost per token is then that of the model without an adapter. Each version is merged from the
original weights, never from those of the version before, so nothing adds up.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from primerl.inference.torch.model import Decoder
from primerl.train.adapters.files import (
    BASE_DIGEST,
    LORA_ALPHA,
    PREFIX,
    adapter_shapes,
    folder_digest,
    targeted_layers,
)
from primerl.train.adapters.merging import digest_tensor
from primerl.train.weights.digest import digest_of
from primerl.train.weights.tensors import NAMES, tensor_hash

log = logging.getLogger(__name__)

DTYPES = {"F32": torch.float32, "U8": torch.uint8}


class MergedAdapter:
    """The adapter that `decoder` serves; none (B is zero) until one was loaded."""

    def __init__(self, decoder: Decoder, folder: Path, rank: int, targets: list[str]) -> None:
        """`decoder` holds the weights in `folder`. Raises ValueError for layers that it does not have."""
        self._decoder = decoder
        self._base_digest = digest_tensor(folder_digest(folder))
        self._rank = rank
        shapes = {name: tuple(tensor.shape) for name, tensor in decoder.tensors.items()}
        self._base = {name: decoder.tensors[f"{name}.weight"].clone() for name in targeted_layers(shapes, targets)}
        self.tensors = {LORA_ALPHA: torch.zeros(1), BASE_DIGEST: self._base_digest.clone()}
        """By the names of a broadcast (docs/architecture.md, "Adapters")."""
        # Those above are read by this process, what is merged is where the weights are.
        matrices = adapter_shapes(shapes, rank, targets).items()
        self.tensors |= {name: torch.zeros(shape, device=decoder.device) for name, shape in matrices}

    def load(self, name: str, dtype: str, data: bytearray) -> None:
        target = self.tensors[name]
        if DTYPES[dtype] != target.dtype:
            raise ValueError(f"{name} is {dtype}; an adapter is published in F32")
        target.copy_(torch.frombuffer(data, dtype=target.dtype).view(target.shape))

    def merge(self) -> None:
        """To be called after all tensors of a version were loaded."""
        if not torch.equal(self.tensors[BASE_DIGEST], self._base_digest):
            log.error("the adapter was trained on another base model than the one in this engine's model.path")
        scale = float(self.tensors[LORA_ALPHA]) / self._rank
        for name, weight in self._base.items():
            a, b = (self.tensors[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
            self._decoder.tensors[f"{name}.weight"].copy_(weight.float() + scale * (b @ a))
        self._decoder.weights_changed()

    def digest(self) -> str:
        """Digest of the adapter in memory, and of the weights that it is merged into."""
        held = {**self.tensors, BASE_DIGEST: self._base_digest}
        return digest_of(
            (name, NAMES[tensor.dtype], tensor.shape, tensor_hash(tensor)) for name, tensor in held.items()
        )
