"""Sets of allowed tokens, one bit a token, as grammars answer with them."""

from __future__ import annotations

import torch
from torch import Tensor


def unpacked(bits: Tensor, vocabulary: int) -> Tensor:
    """Masks [C, at most `vocabulary`], bool, from their bits [C, bytes], uint8, the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    masks = bits.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and(1).bool()
    return masks.flatten(1)[:, :vocabulary]
