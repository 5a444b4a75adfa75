"""Sequences that begin alike as one row in which each shared token stands once: a prefix tree, depth first.

`shared[i]` says how many leading tokens sequence i has in common with the sequence before it. The row is made of what
each sequence adds, `tokens[i][shared[i]:]`:

    tokens    [a b c d e | a b c x]     lengths (5, 4), shared (0, 3)
    row       [a b c d e x]             positions [0 1 2 3 4 3]

A token's hidden state depends on the tokens before it only, so it is the same in every sequence that shares them.
Targets, advantages and losses stay per sequence; autograd adds up the gradients of tokens that several sequences use.

What a sequence adds is contiguous in the row: a `Unit`. Its queries are the last ones of the sequence, so attention
over the gathered keys of the whole sequence, with the causal mask aligned at the end, is exact.

Axes in names: T tokens of the sequences, N in the row, S sequences, U units, K gathered keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

MOST_UNIQUE = 0.9
"""A tree is used where at most this share of the tokens is unique: below, it saves more than gathering keys costs."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Tokens `begin` to before `end` of the row, whose keys are `first` to before `last` of the gathered ones."""

    begin: int
    end: int
    first: int
    last: int

    @property
    def offset(self) -> int:
        """Keys before that of the first query."""
        return self.last - self.first - (self.end - self.begin)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A row of N tokens that stands for S sequences of T tokens."""

    lengths: tuple[int, ...]
    shared: tuple[int, ...]
    kept: Tensor  # [N] int64, which of the T tokens are in the row
    row_of: Tensor  # [T] int64, where in the row each of them is
    positions: Tensor  # [N] int64, the depth: the position in its sequences
    units: tuple[Unit, ...]
    """In the order of the row, which they fill."""
    runs: tuple[tuple[int, int], ...]
    """Begin and end of stretches of the row; one after another they are the gathered keys."""
    keys: Tensor  # [K] int64, the same as indices
    query_bounds: Tensor  # [U + 1] int32
    key_bounds: Tensor  # [U + 1] int32
    most_queries: int
    most_keys: int
    """Most keys of a unit, as `most_queries` are its most queries."""

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int], device: torch.device | str = "cpu") -> PrefixTree:
        """Raises ValueError if the numbers contradict each other."""
        return _tree(tuple(lengths), tuple(shared), None, torch.device(device))

    def in_chunks(self, size: int) -> PrefixTree:
        """For attention in which tokens see their own chunk of `size` tokens of the sequence only."""
        return self if max(self.lengths) <= size else _in_chunks(self.lengths, self.shared, size, self.kept.device)


@lru_cache(maxsize=4)
def _in_chunks(lengths: tuple[int, ...], shared: tuple[int, ...], size: int, device: torch.device) -> PrefixTree:
    """Kept, since every layer of a forward pass asks for the same."""
    return _tree(lengths, shared, size, device)


def check_shared(lengths: Sequence[int], shared: Sequence[int]) -> None:
    """Raises ValueError."""
    if len(shared) != len(lengths) or not lengths or min(lengths) < 1 or min(shared) < 0 or shared[0]:
        raise ValueError(f"shared {list(shared)} does not fit sequences of {list(lengths)} tokens")
    for place, (before, own) in enumerate(pairwise(lengths), start=1):
        if shared[place] > min(before, own):
            raise ValueError(
                f"sequence {place} has {own} tokens and the previous one {before}: it cannot share {shared[place]}"
            )


def unique_tokens(lengths: Sequence[int], shared: Sequence[int]) -> int:
    """Tokens that are computed; `shared` may be empty."""
    return sum(lengths) - sum(shared)


def worth_sharing(lengths: Sequence[int], shared: Sequence[int]) -> bool:
    """Whether a tree saves enough."""
    return bool(shared) and unique_tokens(lengths, shared) < MOST_UNIQUE * sum(lengths)


def shared_with_previous(sequences: Sequence[np.ndarray], least: int = 1) -> list[int]:
    """Leading tokens that each sequence has in common with the previous one; 0 where they are fewer than `least`."""
    shared = [0] if sequences else []
    for before, own in pairwise(sequences):
        most = min(len(before), len(own))
        differ = before[:most] != own[:most]
        common = int(differ.argmax()) if differ.any() else most
        shared.append(common if common >= least else 0)
    return shared


def _tree(lengths: tuple[int, ...], shared: tuple[int, ...], chunk: int | None, device: torch.device) -> PrefixTree:
    check_shared(lengths, shared)
    path: list[tuple[int, int]] = []
    row = start = gathered = 0
    kept, row_of, positions = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    units, runs = list[Unit](), list[tuple[int, int]]()
    for length, common in zip(lengths, shared, strict=True):
        own = length - common
        path = _cut(path, 0, common)
        if own:
            path.append((row, row + own))
        kept.append(np.arange(start + common, start + length))
        positions.append(np.arange(common, length))
        row_of += [np.arange(*run) for run in path]
        # Positions at which a unit begins: the first that is not shared, and each chunk's first.
        begins = [common] if chunk is None else [common, *range((common // chunk + 1) * chunk, length, chunk)]
        for begin, end in pairwise([*begins, length]) if own else ():
            first = 0 if chunk is None else begin // chunk * chunk
            at = row + begin - common
            units.append(Unit(at, at + end - begin, gathered, gathered + end - first))
            runs += _cut(path, first, end)
            gathered += end - first
        row, start = row + own, start + length
    merged = _merged(runs)
    ends = [unit.last for unit in units]

    def on_device(values: Sequence[int] | np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    return PrefixTree(
        lengths=lengths,
        shared=shared,
        kept=on_device(np.concatenate(kept)),
        row_of=on_device(np.concatenate(row_of)),
        positions=on_device(np.concatenate(positions)),
        units=tuple(units),
        runs=merged,
        keys=on_device(np.concatenate([np.arange(*run) for run in merged])),
        query_bounds=on_device([0, *(unit.end for unit in units)], torch.int32),
        key_bounds=on_device([0, *ends], torch.int32),
        most_queries=max(unit.end - unit.begin for unit in units),
        most_keys=max(unit.last - unit.first for unit in units),
    )


def _cut(path: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The runs of a path's tokens `first` to before `last`."""
    ends = list(accumulate(end - begin for begin, end in path))
    found = []
    for (begin, end), reached in zip(path, ends, strict=True):
        low, high = max(first, reached - (end - begin)), min(last, reached)
        if low < high:
            found.append((end - (reached - low), end - (reached - high)))
    return found


def _merged(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same tokens in fewer runs."""
    merged: list[tuple[int, int]] = []
    for begin, end in runs:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return tuple(merged)
