"""An engine that is sent adapters: the model's own weights stay, each version's adapter is merged into a copy.

Merged, since a step's cost per token is then that of the model without an adapter. Each version is merged from the
original weights, never from those of the version before, so nothing adds up.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import xxhash

from primerl.inference.model import Decoder
from primerl.train.adapter_files import BASE_DIGEST, LORA_ALPHA, PREFIX, folder_digest, is_targeted
from primerl.train.config import ALL_LINEAR
from primerl.train.merging import digest_tensor

log = logging.getLogger(__name__)

DTYPES = {"F32": torch.float32, "U8": torch.uint8}


class MergedAdapter:
    """The adapter that `decoder` serves; none (B is zero) until one was loaded."""

    def __init__(self, decoder: Decoder, folder: Path, rank: int, targets: list[str]) -> None:
        """`decoder` holds the weights in `folder`. Raises ValueError for layers that it does not have."""
        self._decoder = decoder
        self._base_digest = digest_tensor(folder_digest(folder))
        self._rank = rank
        names = _targeted(decoder, targets)
        self._base = {name: decoder.tensors[f"{name}.weight"].clone() for name in names}
        self.tensors = {LORA_ALPHA: torch.zeros(1), BASE_DIGEST: self._base_digest.clone()}
        """By the names of a broadcast (docs/architecture.md, "Adapters")."""
        for name, weight in self._base.items():
            self.tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.zeros(rank, weight.shape[1])
            self.tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.zeros(weight.shape[0], rank)

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
        """Of the adapter in memory, and of the weights that it is merged into."""
        held = {**self.tensors, BASE_DIGEST: self._base_digest}
        kinds = {dtype: name for name, dtype in DTYPES.items()}
        lines = [
            f"{name} {kinds[tensor.dtype]} {'x'.join(map(str, tensor.shape))} "
            f"{xxhash.xxh3_64_hexdigest(tensor.view(torch.uint8).numpy().data)}\n"
            for name, tensor in sorted(held.items())
        ]
        return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _targeted(decoder: Decoder, targets: list[str]) -> list[str]:
    linear = [
        name.removesuffix(".weight")
        for name, tensor in decoder.tensors.items()
        if ".layers." in name and name.endswith(".weight") and tensor.dim() == 2
    ]
    if targets == [ALL_LINEAR]:
        return linear
    for target in targets:
        if not any(is_targeted(name, [target]) for name in linear):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            raise ValueError(f"lora.target_modules: the model has no layer {target!r}; there are {known}")
    return [name for name in linear if is_targeted(name, targets)]
