"""MXFP4, in which OpenAI publishes the experts of gpt-oss: 4 bits a weight, and one power of two for each 32 of them
(Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, section 6.3).

A folder holds `<name>_blocks` and `<name>_scales` in place of the tensor `<name>` (E experts, K inputs, N outputs):

    blocks [E, N, K / 32, 16] uint8    two weights a byte, the lower half first
    scales [E, N, K / 32]     uint8    127 + exponent
    weight [E, K, N]                   value of the half byte x 2 ^ (scale - 127)

Every such weight is a bfloat16 number (2 bits of significand, 8 of exponent), so nothing is lost. Needs torch only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the half bytes 0 to 7; 8 to 15 are their negatives."""
GROUP = 32
BIAS = 127


def is_part(name: str) -> bool:
    """Whether the tensor of this name is half of a quantised one."""
    return name.endswith((BLOCKS, SCALES))


def whole_name(name: str) -> str:
    """The name of the tensor that a part belongs to; others' own."""
    return name.removesuffix(BLOCKS).removesuffix(SCALES) if is_part(name) else name


def whole_shape(blocks: Iterable[int]) -> tuple[int, int, int]:
    """[E, K, N] of a tensor with blocks of this shape. Raises ValueError where blocks have another one."""
    experts, outputs, groups, size = blocks
    if 2 * size != GROUP:
        raise ValueError(f"blocks of MXFP4 have {GROUP // 2} bytes, not {size}")
    return experts, groups * GROUP, outputs


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights, [E, K, N] bfloat16, contiguous. Raises ValueError for parts that do not belong together."""
    if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"blocks {list(blocks.shape)} of {blocks.dtype} and scales {list(scales.shape)} of {scales.dtype} are not "
            "parts of one tensor in MXFP4"
        )
    shape = whole_shape(blocks.shape)
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16, device=blocks.device)
    # Whole bytes at once: 256 pairs.
    bytes_ = torch.arange(256, device=blocks.device)
    pairs = torch.stack([values[bytes_ & 15], values[bytes_ >> 4]], dim=1)
    out = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for expert in range(shape[0]):  # one at a time: the indices take four times the result
        exponents = (scales[expert].int() - BIAS).unsqueeze(-1)
        weights = torch.ldexp(pairs[blocks[expert].int()].flatten(-2), exponents)  # [N, K / 32, 32]
        out[expert] = weights.flatten(-2).T
    return out


def joined(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors with parts replaced by what they are of; a part waits for the other one.

    Raises ValueError for a part without the other.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if not is_part(name):
            yield name, tensor
            continue
        whole = whole_name(name)
        parts = waiting.setdefault(whole, {})
        parts[name.removeprefix(whole)] = tensor
        if len(parts) == 2:
            del waiting[whole]
            yield whole, dequantised(parts[BLOCKS], parts[SCALES])
    if waiting:
        raise ValueError(f"half of {min(waiting)} is missing: MXFP4 has {BLOCKS} and {SCALES} of each tensor")
