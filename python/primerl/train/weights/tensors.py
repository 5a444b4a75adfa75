"""Tensors as in safetensors files: names of dtypes, and bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from primerl.train.weights.digest import hash_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LOADABLE = {name: DTYPES[name] for name in ("F32", "BF16", "F16")}
"""Types of the weights that engines load."""


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, [bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def tensor_hash(tensor: Tensor) -> str:
    """Hash of the values in the order of the indices, on any device."""
    # As bytes: numpy, whose buffer is hashed without a copy, has no bfloat16.
    return hash_of(as_bytes(tensor.cpu().contiguous()).numpy().data)
