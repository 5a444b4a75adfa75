"""Where the sequences of a packed row are, and how a layer computes them one by one if no kernel knows of packing:
bucket by bucket, as rows of similar length, and attention written out for what fused kernels do not have.

Axes in names and comments: T tokens of the micro-batch, t of them in a bucket, S sequences, L longest of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from primerl.train.model.prefixes import PrefixTree, worth_sharing

Rows = tuple[Tensor, Tensor, int, int]
"""Where sequences of queries and of keys begin, [S + 1] int32 each, and the longest of each."""

BLOCK_QUERIES = 512
"""Queries of a block of written-out attention."""


class ModelError(ValueError):
    """The model folder cannot be used. The message names the folder and what to do."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, laid out as S rows of L slots for the time of attention.

    `slots[i]` is the slot (row * L + position) of the bucket's i-th token, `tokens[i]` its index in the packed row.
    """

    rows: int
    length: int
    slots: Tensor  # [t] int64
    tokens: Tensor  # [t] int64


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences of a packed row are.

    Worked example, lengths (3, 2): `position_ids` [0 1 2 0 1], `boundaries` [0 3 5], `sequence_ids` [0 0 0 1 1].
    """

    lengths: tuple[int, ...]
    longest: int
    """The largest length. `max(lengths)` in a layer would be compiled again for each number of sequences."""
    position_ids: Tensor  # [1, T] int64
    boundaries: Tensor  # [S + 1] int32
    starts: Tensor  # [S + 1] int64: the boundaries, as some kernels want them
    sequence_ids: Tensor  # [1, T] int32
    buckets: tuple[Bucket, ...]
    tree: PrefixTree | None = None
    """Set where shared tokens are computed once. `position_ids` are then those of the row of N <= T tokens; everything
    else is of the T tokens of all sequences, as without it."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSequences:
        """Raises ValueError for an empty list or a length below 1."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"sequence lengths must be at least 1: {list(lengths)}")
        starts = [0, *accumulate(lengths)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        ids = torch.cat([torch.full((length,), place, dtype=torch.int32) for place, length in enumerate(lengths)])
        return cls(
            lengths=tuple(lengths),
            longest=max(lengths),
            position_ids=positions.unsqueeze(0).to(device),
            boundaries=torch.tensor(starts, dtype=torch.int32, device=device),
            starts=torch.tensor(starts, device=device),
            sequence_ids=ids.unsqueeze(0).to(device),
            buckets=tuple(_bucket(group, starts, device) for group in _similar_lengths(lengths)),
        )

    @classmethod
    def sharing(
        cls, lengths: Sequence[int], shared: Sequence[int], device: torch.device | str = "cpu"
    ) -> PackedSequences:
        """Sequences that each have `shared[i]` leading tokens in common with the previous one (`prefixes`), as a
        tree; one after another if that saves little, or if `shared` is empty. Raises ValueError."""
        packed = cls.from_lengths(lengths, device)
        if not worth_sharing(lengths, shared):
            return packed
        tree = PrefixTree.of(lengths, shared, device)
        return replace(packed, position_ids=tree.positions.unsqueeze(0), tree=tree)

    @property
    def shared(self) -> tuple[int, ...]:
        """Leading tokens of each sequence that are computed with the previous one; empty if none are."""
        return () if self.tree is None else self.tree.shared

    def in_chunks(self, size: int) -> PackedSequences:
        """For attention that sees its own chunk of `size` tokens only: each chunk as a sequence. Positions stay those
        of the sequences, which attention does not look at."""
        if self.longest <= size:
            return self
        if self.tree is not None:
            return replace(self, tree=self.tree.in_chunks(size))
        return _in_chunks(self.lengths, size, self.position_ids.device)


@lru_cache(maxsize=4)
def _in_chunks(lengths: tuple[int, ...], size: int, device: torch.device) -> PackedSequences:
    """Kept, since every layer of a forward pass asks for the same."""
    parts = [min(size, length - start) for length in lengths for start in range(0, length, size)]
    return PackedSequences.from_lengths(parts, device)


def _similar_lengths(lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Groups of (sequence, length), ordered as packed, in each of which the longest is at most twice the shortest.

    Attention is quadratic, so this bounds what the empty slots of a group cost, with few groups.
    """
    by_length = sorted(enumerate(lengths), key=lambda item: -item[1])
    groups: list[list[tuple[int, int]]] = []
    for item in by_length:
        if not groups or 2 * item[1] < groups[-1][0][1]:
            groups.append([])
        groups[-1].append(item)
    return [sorted(group) for group in groups]


def _bucket(group: list[tuple[int, int]], starts: Sequence[int], device: torch.device | str) -> Bucket:
    longest = max(length for _, length in group)
    slots = torch.cat([torch.arange(length) + row * longest for row, (_, length) in enumerate(group)])
    tokens = torch.cat([torch.arange(length) + starts[sequence] for sequence, length in group])
    return Bucket(rows=len(group), length=longest, slots=slots.to(device), tokens=tokens.to(device))


def by_rows(
    kernel: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    **how: Any,
) -> Tensor:
    """Attention [t, H, D] by `kernel`, torch's `varlen_attn` or its like, which aligns the causal mask at the end of
    longer keys. q: [t, H, D]; k, v: [K, H_kv, D]; `how`: what else the kernel takes."""
    left = -1 if window is None else window - 1
    out = kernel(q, k, v, *rows, scale=scale, window_size=(left, 0), **how)
    assert isinstance(out, Tensor)
    return out


def by_bucket(rule: Callable[..., Tensor], packed: PackedSequences, rows: Sequence[Tensor]) -> Tensor:
    """`rule` over sequences as rows: it is called with each of `rows` ([1, T, ...]) as [S, L, ...] and answers with
    [S, L, ...]. What it answers for the empty slots at the end of a row is dropped, so no token may depend on later
    ones. Returns [1, T, ...]."""
    parts = []
    for bucket in packed.buckets:
        own = [row[0] if len(packed.buckets) == 1 else row[0].index_select(0, bucket.tokens) for row in rows]
        answer = rule(*(to_rows(one, bucket) for one in own)).flatten(0, 1)
        parts.append(answer if answer.shape[0] == bucket.slots.shape[0] else answer.index_select(0, bucket.slots))
    if len(parts) == 1:
        return parts[0].unsqueeze(0)
    joined, tokens = torch.cat(parts), torch.cat([bucket.tokens for bucket in packed.buckets])
    return torch.empty_like(joined).index_copy(0, tokens, joined).unsqueeze(0)


def to_rows(x: Tensor, bucket: Bucket) -> Tensor:
    """[t, ...] -> [S, L, ...]; empty slots are 0."""
    slots = bucket.rows * bucket.length
    if x.shape[0] != slots:
        x = x.new_zeros(slots, *x.shape[1:]).index_copy(0, bucket.slots, x)
    return x.reshape(bucket.rows, bucket.length, *x.shape[1:])


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    offset: int = 0,
) -> Tensor:
    """Causal attention with capped scores (Gemma 2) and sinks (GPT-OSS), which fused kernels do not have; scores and
    shares in fp32. A few queries at a time attend to the keys they can see, and are computed again in the backward
    pass, so the scores of a whole sequence never exist.

    Args:
        q: [S, H, L, D].
        k, v: [S, H_kv, offset + L, D]. The query i is at the key `offset` + i.
        window: keys a query sees, its own included; all before it when None.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [H], one more score in each head's softmax, of a key without a value.
    """
    heads, length = q.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    parts = []
    for start in range(0, length, BLOCK_QUERIES):
        end = min(start + BLOCK_QUERIES, length)
        first = 0 if window is None else max(0, offset + start - window + 1)
        given = (
            q[:, :, start:end],
            k[:, :, first : offset + end],
            v[:, :, first : offset + end],
            sinks,
            offset + start - first,
            scale,
            window,
            softcap,
        )
        if length > BLOCK_QUERIES and torch.is_grad_enabled():
            parts.append(checkpoint(_block, *given, use_reentrant=False))
        else:
            parts.append(_block(*given))
    return torch.cat(parts, dim=2)


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    offset: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The query i is at the key `offset` + i."""
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + offset
    distance = at - torch.arange(k.shape[2], device=q.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        shares = scores.softmax(dim=-1)
    else:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return shares.to(v.dtype) @ v
