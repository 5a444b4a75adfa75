"""Micro-batches packed as prefix trees, for a trainer that computes each sample by itself.

The orchestrator packs by the unique tokens of a tree; what a model or a kernel cannot compute as one shows when it is
loaded. In full such a micro-batch would be several times as large as others, so it is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from primerl.train.data.batch import COLUMNS, Batch, MicroBatch


def without_trees(batch: Batch) -> Batch:
    """The same samples; micro-batches without a tree as they are, the others divided into parts of at most as many
    tokens as the tree has, or of one sample."""
    parts: list[MicroBatch] = []
    for micro_batch in batch.micro_batches:
        parts += _divided(micro_batch) if micro_batch.shared else [micro_batch]
    return replace(batch, micro_batches=tuple(parts))


def _divided(whole: MicroBatch) -> Iterator[MicroBatch]:
    most = sum(whole.sequence_lengths) - sum(whole.shared)
    first = begin = end = 0
    for number, length in enumerate(whole.sequence_lengths):
        if number > first and end + length - begin > most:
            yield _part(whole, first, number, begin, end)
            first, begin = number, end
        end += length
    yield _part(whole, first, len(whole.sequence_lengths), begin, end)


def _part(whole: MicroBatch, first: int, last: int, begin: int, end: int) -> MicroBatch:
    """Sequences `first` to before `last`, which are the tokens `begin` to before `end`."""
    own = slice(begin, end)
    grammars = (run for run in whole.grammars if begin <= run.begin < end)
    return replace(
        whole,
        **{name: getattr(whole, name)[own] for name in COLUMNS},
        sequence_lengths=whole.sequence_lengths[first:last],
        rollouts=whole.rollouts[first:last],
        environments=whole.environments[first:last],
        truncation=None if whole.truncation is None else whole.truncation[own],
        grammars=tuple(replace(run, begin=run.begin - begin, end=run.end - begin) for run in grammars),
        extra={name: column[own] for name, column in whole.extra.items()},
        shared=(),
    )
