"""Sequences that begin alike, and what a model computes of them as a tree and one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from families import SMALL
from primerl.train.model.packed_model import PackedSequences, output_head, predicted_hidden
from primerl.train.model.prefixes import shared_with_previous
from primerl.train.objective.logprobs import token_logprobs
from torch import Tensor


@dataclass(frozen=True)
class Trie:
    """Sequences in the order of their tokens; `targets` are packed indices of the T tokens."""

    sequences: list[np.ndarray]
    shared: list[int]

    @classmethod
    def of(cls, sequences: list[np.ndarray]) -> Trie:
        ordered = sorted(sequences, key=lambda one: one.astype(">u4").tobytes())
        return cls(ordered, shared_with_previous(ordered))

    @property
    def lengths(self) -> list[int]:
        return [len(one) for one in self.sequences]

    @property
    def token_ids(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self.sequences))

    @property
    def targets(self) -> Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths]).nonzero().squeeze(1)

    def weights(self) -> Tensor:
        """An advantage for each target: those of tokens that several samples train differ."""
        generator = torch.Generator().manual_seed(2)
        return torch.randn(len(self.targets), generator=generator)

    def plain(self) -> PackedSequences:
        return PackedSequences.from_lengths(self.lengths)

    def tree(self) -> PackedSequences:
        packed = PackedSequences.sharing(self.lengths, self.shared)
        assert packed.tree is not None
        return packed


def group_and_branches(seed: int = 0, vocabulary: int = SMALL["vocab_size"]) -> Trie:
    """A group of samples behind one prompt, branches that leave each other at several depths, duplicates, samples that
    are beginnings of others, some that differ in one token, and one that shares nothing. Long enough for the windows
    and chunks of 8 tokens of `families`."""
    draw = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return draw.integers(0, vocabulary, count)

    prompt = tokens(19)
    group = [np.concatenate([prompt, tokens(length)]) for length in (9, 1, 14, 5)]
    turn = np.concatenate([group[2], tokens(6)])
    branches = [np.concatenate([turn, tokens(length)]) for length in (3, 11)]
    other_end = turn.copy()
    other_end[-1] = (other_end[-1] + 1) % vocabulary
    return Trie.of([*group, turn, *branches, other_end, branches[1].copy(), prompt.copy(), tokens(13)])


def logprobs_of(model: Any, trie: Trie, packed: PackedSequences) -> Tensor:
    """Log-probabilities of the targets."""
    targets = trie.targets
    hidden = predicted_hidden(model, trie.token_ids, packed, targets)
    found, _ = token_logprobs(hidden, output_head(model), trie.token_ids[targets], chunk_tokens=16)
    return found


def trained(
    model: Any, trie: Trie, packed: PackedSequences, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and the gradients of a loss that is not linear in them, as policy losses are not."""
    model.zero_grad()
    found = logprobs_of(model, trie, packed)
    weights = trie.weights() if weights is None else weights
    (-(weights * (found + 5.0).exp().clamp(max=20.0)).sum() / len(found)).backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return found.detach(), gradients


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient as a share of its norm, and whose it is. Gradients that are 0 but for
    rounding (of the biases of keys) are measured by the largest norm."""
    assert one.keys() == other.keys()
    most = max(float(gradient.norm()) for gradient in one.values())
    shares = {name: float((one[name] - other[name]).norm()) / max(float(one[name].norm()), 1e-3 * most) for name in one}
    name = max(shares, key=shares.__getitem__)
    return shares[name], name
