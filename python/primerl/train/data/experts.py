"""The experts that engines chose for the tokens of a micro-batch, as they come with it (docs/architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNKNOWN = -1
"""Stands for the experts of a token for which no engine reported any."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of some tokens of a micro-batch of T tokens, in every layer.

    Worked example: T = 5; of the first sequence the tokens 1 and 2 are known, of the second token 4:

        runs   ((1, 3), (4, 5))
        values [R = 3, layers, k]
    """

    runs: tuple[tuple[int, int], ...]  # begin, end; in order, apart from each other
    values: Tensor  # [R, layers, k] uint8 or uint16; R is the sum of the runs' lengths

    def of_all(self, tokens: int, device: torch.device | str) -> Tensor:
        """[tokens, layers, k] int32, UNKNOWN where none were reported."""
        layers, chosen = self.values.shape[1:]
        found = torch.full((tokens, layers, chosen), UNKNOWN, dtype=torch.int32)
        first = 0
        for begin, end in self.runs:
            found[begin:end] = self.values[first : first + end - begin].to(torch.int32)
            first += end - begin
        return found.to(device)
