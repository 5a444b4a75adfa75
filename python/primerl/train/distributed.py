"""Data ranks: every rank trains its share of a batch, gradients are summed over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the data ranks, as `torchrun` tells it (RANK, WORLD_SIZE, LOCAL_RANK); alone without it."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, timeout_s: float) -> Ranks:
        """Meet the other ranks. A rank that is missing for `timeout_s`, here or in a sum, ends this process."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return cls(rank, size, device)

    @property
    def leads(self) -> bool:
        """Rank 0 publishes weights and writes metrics."""
        return self.rank == 0

    def leave(self) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Replace every gradient by its sum over the ranks. The loss is already divided by the tokens of all ranks."""
        if self.size == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                # A rank whose micro-batches are empty still takes part in the sum.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch.distributed.all_reduce(flat)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks."""
        if self.size > 1:
            values = values.clone()
            torch.distributed.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Largest over the ranks, value by value."""
        if self.size > 1:
            values = values.clone()
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        return values

    def union(self, names: Iterable[str]) -> list[str]:
        """Names of all ranks, sorted."""
        own = sorted(set(names))
        if self.size == 1:
            return own
        found: list[list[str]] = [[] for _ in range(self.size)]
        torch.distributed.all_gather_object(found, own)
        return sorted({name for names in found for name in names})
