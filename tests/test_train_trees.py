"""Sequences that begin alike, computed as a tree, give what they give one after another: log-probabilities and
gradients. What would be wrong is shown to be far off."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, WITH_STATE
from primerl.train.model.packed_model import load_model
from tree_helpers import furthest, group_and_branches, trained

LOGPROB, GRADIENT = 3e-5, 3e-5
"""In fp32: largest difference of a log-probability, nats, and of a gradient, as a share of its norm."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which GPT-BigCode uses
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WITH_STATE))
def test_tree_equals_plain(family: str, folders: Any) -> None:
    model, trie = load_model(folders(family)), group_and_branches()
    expected, expected_gradients = trained(model, trie, trie.plain())
    found, gradients = trained(model, trie, trie.tree())
    off, worst = float((found - expected).abs().max()), furthest(expected_gradients, gradients)
    assert off <= LOGPROB
    assert worst[0] <= GRADIENT, worst
