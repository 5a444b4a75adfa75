"""The loss of supervised fine-tuning, over packed rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from primerl.train.data.packing import MicroBatch, StepBatch
from primerl.train.distributed.fsdp import nothing, packed_logprobs, sum_gradients_after
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.model.routing import RoutingLoad


def summed_loss(model: Any, batch: MicroBatch) -> Tensor:
    """Cross-entropy of the micro-batch's trained tokens, summed, in nats."""
    return _losses(model, batch).sum()


def forward_backward(model: Any, batch: StepBatch, ranks: Ranks = ALONE, routing: RoutingLoad | None = None) -> float:
    """Accumulate the gradient of the mean loss over the step's trained tokens; returns that loss, in nats."""
    losses = []
    for index in range(batch.most_micro_batches):
        sum_gradients_after(model, last=index == batch.most_micro_batches - 1)
        if index < len(batch.micro_batches):
            with nullcontext() if routing is None else routing.recording():
                loss = summed_loss(model, batch.micro_batches[index]) / batch.trained_tokens
        else:
            loss = nothing(model, ranks)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return ranks.sum(torch.stack(losses).sum()).item()


@torch.no_grad()
def row_losses(model: Any, micro_batches: list[MicroBatch], most: int, ranks: Ranks = ALONE) -> dict[int, float]:
    """The summed loss of each row of this rank, by its index among all rows. All ranks have to call it; `most`:
    micro-batches of the one that has most."""
    losses: dict[int, float] = {}
    for micro_batch in micro_batches:
        sequences = torch.bucketize(micro_batch.targets, micro_batch.packed.boundaries.long(), right=True) - 1
        sums = torch.zeros(len(micro_batch.rows), dtype=torch.float64, device=sequences.device)
        sums.index_add_(0, sequences, _losses(model, micro_batch).double())
        losses |= zip(micro_batch.rows, sums.tolist(), strict=True)
    for _ in range(most - len(micro_batches)):
        nothing(model, ranks)
    return losses


def _losses(model: Any, batch: MicroBatch) -> Tensor:
    """[trained] fp32."""
    logprobs, *_ = packed_logprobs(model, batch.token_ids, batch.packed, batch.targets, entropy=False)
    return -logprobs
