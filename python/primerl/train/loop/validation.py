"""Validation: the loss on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from primerl.train.data.packing import Ahead, MicroBatch, micro_batch, packed_groups
from primerl.train.data.rows import Rows
from primerl.train.data.trees import packed_trees
from primerl.train.distributed.fsdp import nothing
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.loop.progress import progress
from primerl.train.loop.stop import MOST_LISTED, TrainingDiverged, listed
from primerl.train.objective.cross_entropy import row_losses, summed_loss


class Validation:
    """Every row once, packed in the same way each time; each rank has its share of the micro-batches."""

    def __init__(self, rows: Rows, seq_len: int, device: torch.device, ranks: Ranks = ALONE) -> None:
        self._rows = rows
        self._titles = rows.titles
        self._device = device
        self._ranks = ranks
        self._seq_len = seq_len
        self.share(False)

    def share(self, shares: bool) -> None:
        """Pack the rows: those that begin alike as a tree if `shares`."""
        rows, ranks = self._rows, self._ranks
        pack = packed_trees if shares else packed_groups
        groups = [
            (subset, group)
            for subset, (first, end) in enumerate(pairwise(rows.firsts))
            for group in pack([rows.row(index) for index in range(first, end)], self._seq_len)
        ]
        self._shares = shares
        self._groups = groups[ranks.rank :: ranks.size]
        self._most = -(-len(groups) // ranks.size)

    @torch.no_grad()
    def measure(self, model: Any, step: int) -> dict[str, float]:
        """`val/loss`: mean over all trained tokens; with several datasets also `val/<dataset>/loss`.

        Raises:
            TrainingDiverged: it is not finite. The message names the rows.
        """
        was_training = model.training
        model.eval()
        losses = torch.zeros(len(self._titles), dtype=torch.float64)
        tokens = torch.zeros(len(self._titles), dtype=torch.float64)
        batches, suspects = Ahead(self._micro_batches()), list[MicroBatch]()
        try:
            with progress("validating") as report:
                for done, (subset, batch) in enumerate(batches, start=1):
                    loss = summed_loss(model, batch).double().cpu()
                    if not bool(loss.isfinite()) and len(suspects) < MOST_LISTED:
                        suspects.append(batch)
                    losses[subset] += loss
                    tokens[subset] += batch.targets.shape[0]
                    report(done / len(self._groups), f"{int(tokens.sum()):,} tokens")
            for _ in range(self._most - len(self._groups)):
                nothing(model, self._ranks)
            self._check(model, suspects, step)
        finally:
            batches.close()
            model.train(was_training)
        losses, tokens = self._ranks.sum(torch.stack([losses, tokens]).to(self._ranks.device)).cpu()
        metrics = {"val/loss": (losses.sum() / tokens.sum()).item()}
        if len(self._titles) > 1:
            each = zip(self._titles, losses.tolist(), tokens.tolist(), strict=True)
            metrics |= {f"val/{title}/loss": loss / count for title, loss, count in each if count}
        return metrics

    def _check(self, model: Any, suspects: list[MicroBatch], step: int) -> None:
        """`suspects`: micro-batches of this rank whose loss is not finite."""
        most = int(self._ranks.largest(torch.tensor([len(suspects)], device=self._device)).item())
        if not most:
            return
        losses = row_losses(model, suspects, most, self._ranks)
        bad = self._ranks.union(self._rows.name(row) for row, loss in losses.items() if not math.isfinite(loss))
        rows = listed(bad, "; ") or "any of them, each of which has a finite loss by itself"
        raise TrainingDiverged(
            f"step {step}: the loss on rows that are held out (val.data) is not finite; look at {rows}, or lower "
            "optim.lr"
        )

    def _micro_batches(self) -> Iterator[tuple[int, MicroBatch]]:
        for subset, group in self._groups:
            yield subset, micro_batch(group, self._device, share=self._shares)
