"""Groups rows into micro-batches: by length alone, or so that rows that begin alike come together.

In the second way the unit is a *cluster*: rows in the order of their tokens, each of which shares at least
`LEAST_SHARED` tokens with the previous one. Its size is its number of unique tokens, or an eighth of all its tokens, if
that is more. A cluster that is too large is cut in that order, and the first row of each part is there in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from primerl.train.model.prefixes import shared_with_previous, worth_sharing

Item = TypeVar("Item")


class HasTokens(Protocol):
    """A row of fine-tuning, or a datum of a client."""

    @property
    def token_ids(self) -> Tensor:
        """[T], integers."""

    def __len__(self) -> int: ...


Row = TypeVar("Row", bound=HasTokens)

LEAST_SHARED = 32
"""Rows that share fewer tokens are not tied together, and none of them is computed once: a beginning that all rows
have, such as a template's first tokens, would make one cluster of them all."""

KEYS_PER_TOKEN = 8
"""Keys that attention gathers, at most, for each token of `seq_len`: copies, for the time of a layer. As in the
orchestrator's packer."""


def packed_groups(rows: Sequence[Row], seq_len: int) -> list[list[Row]]:
    """The rows in as few groups of at most `seq_len` tokens as first-fit in order of decreasing length finds."""
    return first_fit(rows, [len(row) for row in rows], seq_len)


def packed_trees(rows: Sequence[Row], seq_len: int, least: int = LEAST_SHARED) -> list[list[Row]]:
    """The rows in groups of at most `seq_len` unique tokens, those that begin alike next to each other; as
    `packed_groups` where they share little. The same rows in any order give the same groups, but for rows of the same
    tokens."""
    ordered = sorted(rows, key=lambda row: row.token_ids.numpy().astype(">u4").tobytes())
    shared = shared_with_previous([row.token_ids.numpy() for row in ordered], least)
    if not worth_sharing([len(row) for row in rows], shared):
        return packed_groups(rows, seq_len)
    parts: list[list[Row]] = []
    unique: list[int] = []
    keys: list[int] = []
    for row, common in zip(ordered, shared, strict=True):
        own = len(row) - common
        if common and unique[-1] + own <= seq_len and keys[-1] + len(row) <= KEYS_PER_TOKEN * seq_len:
            parts[-1].append(row)
            unique[-1] += own
            keys[-1] += len(row)
        else:
            parts.append([row])
            unique.append(len(row))
            keys.append(len(row))
    sizes = [max(own, -(-gathered // KEYS_PER_TOKEN)) for own, gathered in zip(unique, keys, strict=True)]
    return [[row for part in group for row in part] for group in first_fit(parts, sizes, seq_len)]


def first_fit(items: Sequence[Item], sizes: Sequence[int], capacity: int) -> list[list[Item]]:
    """The items in as few groups of at most `capacity` as first-fit in order of decreasing size finds, in O(n log n)
    for n items. One that is larger gets a group of its own."""
    groups: list[list[Item]] = []
    leaves = 1 << max(0, len(items) - 1).bit_length()
    # A binary tree in an array: node n is over 2n and 2n + 1, leaf `leaves + g` is the room that group g has left, any
    # other node the larger of the two below. A group without items has all its room, so the first that fits is there.
    most = [capacity] * (2 * leaves)
    for index in sorted(range(len(items)), key=sizes.__getitem__, reverse=True):
        size, node = sizes[index], 1
        if size > most[1]:
            node = leaves + len(groups)
        while node < leaves:
            node *= 2
            if most[node] < size:
                node += 1
        if node - leaves == len(groups):
            groups.append([])
        groups[node - leaves].append(items[index])
        most[node] -= size
        while node > 1:
            node //= 2
            left, right = most[2 * node], most[2 * node + 1]
            larger = left if left >= right else right
            if most[node] == larger:
                break
            most[node] = larger
    return groups
