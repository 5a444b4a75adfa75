"""Packs rows into the micro-batches of each step, in a thread while the model trains the previous ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from primerl.train.data.mixture import Mixture, steps
from primerl.train.data.rows import Row, Rows
from primerl.train.data.trees import LEAST_SHARED, packed_trees
from primerl.train.data.trees import packed_groups as packed_groups
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.model.packed_model import PackedSequences
from primerl.train.model.prefixes import shared_with_previous

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows one after the other, without padding. `targets` are the packed indices of the trained tokens."""

    token_ids: Tensor  # [T] int64
    targets: Tensor  # [trained] int64
    packed: PackedSequences
    rows: list[int]
    """Their indices among all rows, in the order of the sequences."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step trains. `position` and `epoch` are those of the data after it."""

    micro_batches: list[MicroBatch]
    """Micro-batches of this rank, which may have one less than others. Everything else covers all ranks."""
    most_micro_batches: int
    """Micro-batches of the rank with the most."""
    trained_tokens: int
    samples: list[int]
    """Rows of each subset."""
    tokens: list[int]
    """Tokens of each subset."""
    longest: int
    """Tokens of the longest row."""
    position: dict[str, int]
    epoch: float

    def saved(self, rows: Rows) -> bytes:
        """This rank's part as a safetensors file: `<n>.token_ids`, `<n>.targets`, `<n>.boundaries` of micro-batch n;
        the names of its rows are in the metadata."""
        tensors: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        for n, batch in enumerate(self.micro_batches):
            columns = {"token_ids": batch.token_ids, "targets": batch.targets, "boundaries": batch.packed.boundaries}
            tensors |= {f"{n}.{name}": column.cpu() for name, column in columns.items()}
            names[f"{n}.rows"] = "\n".join(map(rows.name, batch.rows))
        return save(tensors, names)


def micro_batch(rows: list[Row], device: torch.device, *, share: bool = False) -> MicroBatch:
    """`share`: compute tokens that a row has in common with the row before it once, where that saves enough."""
    shared = shared_with_previous([row.token_ids.numpy() for row in rows], LEAST_SHARED) if share else []
    packed = PackedSequences.sharing([len(row) for row in rows], shared, device)
    token_ids = torch.cat([row.token_ids for row in rows]).long()
    loss_mask = torch.cat([row.loss_mask for row in rows])
    starts = torch.tensor([0, *(len(row) for row in rows[:-1])]).cumsum(0)
    loss_mask[starts] = 0  # the first token of a row has no prediction, whatever its mask says
    targets = loss_mask.nonzero().squeeze(1)
    return MicroBatch(token_ids.to(device), targets.to(device), packed, [row.index for row in rows])


def step_batches(
    mixture: Mixture,
    rows: Rows,
    batch_size: int,
    seq_len: int,
    epochs: int | None,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    share: bool = False,
) -> Iterator[StepBatch]:
    """The steps from the mixture's position on. All ranks read the same rows, and each takes its share of the
    micro-batches, so a run resumes from the same place with any number of ranks. `share`: rows that begin alike are
    packed together, and what they share is computed once."""
    pack = packed_trees if share else packed_groups
    for indices in steps(mixture, rows, batch_size, epochs):
        chosen = [rows.row(index) for index in indices]
        samples, tokens = [0] * len(rows.titles), [0] * len(rows.titles)
        for row in chosen:
            samples[row.subset] += 1
            tokens[row.subset] += len(row)
        longest = max(map(len, chosen))
        groups = pack(chosen, seq_len)
        micro_batches = [micro_batch(group, device, share=share) for group in groups[ranks.rank :: ranks.size]]
        most = -(-len(groups) // ranks.size)
        if ranks.size == 1:
            trained = sum(batch.targets.shape[0] for batch in micro_batches)
        else:
            trained = sum(int(row.loss_mask[1:].count_nonzero()) for row in chosen)
        yield StepBatch(micro_batches, most, trained, samples, tokens, longest, mixture.position(), mixture.epoch)


class Ahead(Generic[T]):
    """An iterator that is read by a thread of its own, `depth` items ahead."""

    def __init__(self, source: Iterator[T], depth: int = 4) -> None:
        self._source = source
        self._ready: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="packing", daemon=True)
        self._thread.start()

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)  # the next call raises it again
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:  # noqa: BLE001 (raised again in `__next__`)
            self._put(error)

    def _put(self, item: T | BaseException) -> bool:
        """Waits for room in the queue; false once the iterator is closed."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
