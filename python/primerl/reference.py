"""Log-probabilities of truncated sampling in double precision, for `primerl verify`. Shares nothing with the trainer's
(`primerl.train.truncation`), nor with the engine's.

Where the edge of the kept set lies nearer to a token than rounding reaches, an engine may keep that token or leave it
out. So there are three sets: as the numbers say, and with all edges moved a little outwards and inwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLACK = 1e-4
"""How far edges are moved, in nats of a logit and in shares of the probability: well above what fp32 engines round."""


def truncated_logprobs(scaled: Tensor, token: int, *, top_p: float, top_k: int, min_p: float) -> list[float]:
    """Log-probability of a sampled token by each of the three sets.

    Args:
        scaled: [V], logits divided by the temperature.
    """
    ordered, order = scaled.double().sort(descending=True)
    place = int((order == token).nonzero())
    return [_logprob(ordered, place, top_p, top_k, min_p, slack) for slack in (0.0, SLACK, -SLACK)]


def _logprob(ordered: Tensor, place: int, top_p: float, top_k: int, min_p: float, slack: float) -> float:
    """Of the token at `place` in order; it is kept in any case."""
    count = len(ordered)
    if min_p > 0:
        count = _at_least(ordered, count, float(ordered[0]) + math.log(min_p) - slack)
    if 0 < top_k < len(ordered):
        count = _at_least(ordered, count, float(ordered[top_k - 1]) - slack)
    if top_p < 1:
        probabilities = ordered[:count].softmax(dim=0)
        before = probabilities.cumsum(dim=0) - probabilities
        count = max(1, int((before < top_p + slack).sum()))
    kept = ordered[:count] if place < count else torch.cat([ordered[:count], ordered[place : place + 1]])
    return float(ordered[place] - kept.logsumexp(dim=0))


def _at_least(ordered: Tensor, count: int, lowest: float) -> int:
    return min(count, int((ordered >= lowest).sum()))
