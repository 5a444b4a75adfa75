"""A few tokens that are published with weights, and what the trainer makes of them: an engine that has loaded the
weights has to make the same of them before what it samples is taken. Hashes prove what it was given, not what it uses.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from primerl.train.distributed import ALONE, Ranks
from primerl.train.model import PackedSequences
from primerl.train.parallel import packed_logprobs

TOKENS = 16


class Probe(TypedDict):
    """As in a manifest."""

    token_ids: list[int]
    """[N], random: what no text has says as much about weights as what every text has."""
    logprobs: list[float]
    """[N], nats, of each token after those before it, at temperature 1; 0 for the first."""


@torch.no_grad()
def probe_of(model: Any, ranks: Ranks = ALONE) -> Probe:
    """What this model computes now. All ranks have to call it."""
    device = ranks.device
    words = min(model.get_input_embeddings().num_embeddings, model.config.get_text_config().vocab_size)
    token_ids = torch.randint(words, (TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    packed = PackedSequences.from_lengths([TOKENS], device)
    logprobs, *_ = packed_logprobs(model, token_ids, packed, torch.arange(1, TOKENS, device=device))
    return {"token_ids": token_ids.tolist(), "logprobs": [0.0, *logprobs.tolist()]}
