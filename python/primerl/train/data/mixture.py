"""The order in which rows are trained: shuffled, mixed by ratio, epoch after epoch.

A pool is a set of rows that is read once an epoch of its own, in an order that its seed and the epoch's number decide.
Without ratios all rows are one pool. With ratios each subset is one, and the next row is from the pool that is furthest
behind its share, so that after n rows each has given its share of n, rounded. All that has to be known to resume at a
row is how many each pool has given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import xxhash

from primerl.train.data.rows import Rows


@dataclass(slots=True)
class Pool:
    """Rows `first` to `first + rows - 1`."""

    name: str
    first: int
    rows: int
    share: float
    given: int = 0
    _epoch: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list, init=False)

    def next_row(self, shuffle: bool, seed: int) -> int:
        """The next row; it is not counted as given."""
        epoch, place = divmod(self.given, self.rows)
        if not shuffle:
            return self.first + place
        if epoch != self._epoch:
            # A generator of its own: none has to be saved, and no subset's order depends on the others.
            generator = torch.Generator().manual_seed(
                xxhash.xxh3_64_intdigest(f"{seed}/{self.name}/{epoch}".encode()) >> 1
            )
            self._epoch, self._order = epoch, torch.randperm(self.rows, generator=generator).tolist()
        return self.first + self._order[place]


class Mixture:
    """The rows of a run in training order."""

    def __init__(self, rows: Rows, ratios: list[float] | None, *, shuffle: bool, seed: int) -> None:
        """`ratios`: one for each subset, none of which may be empty; they need not add up to 1."""
        self._shuffle = shuffle
        self._seed = seed
        if ratios is None:
            self.pools = [Pool("all", 0, len(rows), 1.0)]
        else:
            spans = zip(rows.titles, pairwise(rows.firsts), ratios, strict=True)
            total = sum(ratios)
            self.pools = [Pool(title, first, end - first, ratio / total) for title, (first, end), ratio in spans]
        self._rows = len(rows)

    @property
    def given(self) -> int:
        return sum(pool.given for pool in self.pools)

    @property
    def epoch(self) -> float:
        """Rows given, as a multiple of all rows."""
        return self.given / self._rows

    def peek(self) -> tuple[Pool, int]:
        """The pool that is next, and its row."""
        if len(self.pools) == 1:
            pool = self.pools[0]
        else:
            after = self.given + 1
            pool = max(self.pools, key=lambda pool: pool.share * after - pool.given)
        return pool, pool.next_row(self._shuffle, self._seed)

    def position(self) -> dict[str, int]:
        return {pool.name: pool.given for pool in self.pools}

    def go_to(self, position: dict[str, Any]) -> None:
        """Raises ValueError if the position belongs to other pools."""
        if set(position) != {pool.name for pool in self.pools}:
            raise ValueError(f"it counts rows of {sorted(position)}; these are {[pool.name for pool in self.pools]}")
        for pool in self.pools:
            pool.given = position[pool.name]

    def describe(self) -> dict[str, Any]:
        """What decides the order, besides the rows."""
        return {
            "shuffle": self._shuffle,
            "seed": self._seed if self._shuffle else None,
            "shares": {pool.name: pool.share for pool in self.pools},
        }


def steps(mixture: Mixture, rows: Rows, batch_size: int, epochs: int | None) -> Iterator[list[int]]:
    """Rows of each step: as many as fit into `batch_size` tokens, never part of one. Without `epochs`, endless.

    An epoch ends within a step, which continues with rows of the next one; only the last step of all may be short.
    """
    end = None if epochs is None else epochs * len(rows)
    while end is None or mixture.given < end:
        step: list[int] = []
        tokens = 0
        while end is None or mixture.given < end:
            pool, row = mixture.peek()
            tokens += rows.length(row)
            if step and tokens > batch_size:
                break
            step.append(row)
            pool.given += 1
        yield step
