"""Loss on rows that are not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from primerl.train.logprobs import token_logprobs
from primerl.train.model import output_head, predicted_hidden
from primerl.train.packing import Ahead, MicroBatch, micro_batch, packed_groups
from primerl.train.progress import progress
from primerl.train.rows import Rows


def summed_loss(model: Any, batch: MicroBatch) -> Tensor:
    """Cross-entropy of the micro-batch's trained tokens, summed, in nats."""
    hidden = predicted_hidden(model, batch.token_ids, batch.packed, batch.targets)
    logprobs, _ = token_logprobs(hidden, output_head(model), batch.token_ids[batch.targets])
    return -logprobs.sum()


class Validation:
    """Every row once, packed in the same way each time."""

    def __init__(self, rows: Rows, seq_len: int, device: torch.device) -> None:
        self._titles = rows.titles
        self._device = device
        self._groups = [
            (subset, group)
            for subset, (first, end) in enumerate(pairwise(rows.firsts))
            for group in packed_groups([rows.row(index) for index in range(first, end)], seq_len)
        ]

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, float]:
        """`val/loss`: mean over all trained tokens; with several datasets also `val/<dataset>/loss`."""
        was_training = model.training
        model.eval()
        losses = torch.zeros(len(self._titles), dtype=torch.float64)
        tokens = [0] * len(self._titles)
        batches = Ahead(self._micro_batches())
        try:
            with progress("validating") as report:
                for done, (subset, batch) in enumerate(batches, start=1):
                    losses[subset] += summed_loss(model, batch).double().cpu()
                    tokens[subset] += batch.targets.shape[0]
                    report(done / len(self._groups), f"{sum(tokens):,} tokens")
        finally:
            batches.close()
            model.train(was_training)
        metrics = {"val/loss": losses.sum().item() / sum(tokens)}
        if len(self._titles) > 1:
            each = zip(self._titles, losses.tolist(), tokens, strict=True)
            metrics |= {f"val/{title}/loss": loss / count for title, loss, count in each if count}
        return metrics

    def _micro_batches(self) -> Iterator[tuple[int, MicroBatch]]:
        for subset, group in self._groups:
            yield subset, micro_batch(group, self._device)
