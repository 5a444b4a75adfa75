"""How what is measured of tokens is distributed, in fixed bins, so that micro-batches and data ranks add up."""

from __future__ import annotations

from typing import Any

import torch

from primerl.train.distributed import Ranks
from primerl.train.loss import TokenValues

RANGES = {"entropy": (0.0, 12.0, 48), "log_ratio": (-1.0, 1.0, 50)}
"""First edge, last edge, bins. Values beyond an edge are in the bin next to it. Nats."""


class Histograms:
    """Counts of tokens, `[bins]` int64 each."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.counts = {
            name: torch.zeros(bins, dtype=torch.int64, device=device) for name, (_, _, bins) in RANGES.items()
        }

    @torch.no_grad()
    def add(self, values: TokenValues) -> None:
        for name, (low, high, bins) in RANGES.items():
            column = values.columns[name][values.sampled].float()
            place = ((column - low) * (bins / (high - low))).floor().clamp(0, bins - 1)
            # What is not a number has no bin, and the run does not outlive it.
            self.counts[name] += torch.bincount(place[place.isfinite()].long(), minlength=bins)

    def over(self, ranks: Ranks) -> Histograms:
        """Of all data ranks."""
        whole = Histograms()
        whole.counts = {name: ranks.sum(counts) for name, counts in self.counts.items()}
        return whole

    def line(self) -> dict[str, Any]:
        """`{name: {"edges": [bins + 1], "counts": [bins]}}`; of what no token was measured for, nothing."""
        found = {}
        for name, (low, high, bins) in RANGES.items():
            counts = self.counts[name].tolist()
            if sum(counts):
                edges = [low + (high - low) * edge / bins for edge in range(bins + 1)]
                found[name] = {"edges": edges, "counts": counts}
        return found
