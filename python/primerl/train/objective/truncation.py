"""Truncated sampling, replayed: the trainer's log-probabilities among the tokens that its own logits keep.

An engine that samples with `top_p`, `top_k` or `min_p` samples from softmax(z) restricted to a kept set K(z) and
renormalised, z being the logits divided by the temperature; that is what its log-probabilities are of. The trainer
computes the same of its own logits: for the sampled token y

    log p(y) = z_y - logsumexp of z_j over j in K(z) or j = y

K(z) is found in vLLM's order, each filter on what the previous one has kept:

    min_p    z_j >= max z + log(min_p)
    top_k    z_j >= the k-th largest; what is equal to it stays
    top_p    the most likely tokens, as long as those before them have less than top_p of the probability; at least one

It is a constant for the gradient: where it changes, p jumps and has no derivative. Excluded tokens get none.

What is exact and what is not. With the weights that sampled, both sides keep the same set (rounding may differ at its
edge), and the ratio of trainer to engine is 1. With newer weights each side keeps its own set, and the ratio is that of
the two truncated policies, with two departures:
- y may have left the trainer's set. Its probability is 0 then, and the ratio would stop every gradient; y is kept
  nevertheless, with the probability it has next to the others. The ratio is too large by that.
- What only the trainer keeps was never sampled, so the expectation of the ratio is below 1 by its probability.
Both vanish with staleness. The alternative is to have the engine send its set and to apply that one ("Keep Sampling
Mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1): both sides share one support, and the ratio is unbiased for the
policy restricted to the old policy's set; it costs up to k token ids for every token. Recomputing the set costs nothing
on the way, and trains the policy that is sampled next: truncated by its own probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from primerl.train.objective.logprobs import LogitsHook


@dataclass(frozen=True, slots=True)
class Truncation:
    """How each of N tokens was sampled; 1, 0 and 0 keep all tokens."""

    top_p: Tensor  # [N] fp32, above 0, at most 1
    top_k: Tensor  # [N] int64
    min_p: Tensor  # [N] fp32, 0 to 1

    def __getitem__(self, index: Tensor | slice) -> Truncation:
        return Truncation(self.top_p[index], self.top_k[index], self.min_p[index])

    def to(self, device: torch.device | str) -> Truncation:
        return Truncation(self.top_p.to(device), self.top_k.to(device), self.min_p.to(device))


def truncate(scaled: Tensor, token_ids: Tensor, truncation: Truncation) -> Tensor:
    """The logits, -inf where a token is excluded.

    Args:
        scaled: [N, V] fp32, divided by the temperature.
        token_ids: [N] int64, what was sampled; always kept.
    """
    kept = scaled.detach() >= _lowest_kept(scaled.detach(), truncation).unsqueeze(1)
    kept.scatter_(1, token_ids.unsqueeze(1), True)
    return scaled.masked_fill(~kept, -torch.inf)


def replaying(token_ids: Tensor, truncation: Truncation) -> LogitsHook:
    """The hook that `primerl.train.objective.logprobs.token_logprobs` calls for each chunk of these N tokens."""

    def leave_out(scaled: Tensor, rows: slice) -> Tensor:
        return truncate(scaled, token_ids[rows], truncation[rows])

    return leave_out


def _lowest_kept(scaled: Tensor, truncation: Truncation) -> Tensor:
    """Logit of the least likely token that is kept, [N]."""
    vocabulary = scaled.shape[1]
    lowest = scaled.amax(dim=1) + truncation.min_p.log()
    has_top_k, has_top_p = truncation.top_k > 0, truncation.top_p < 1
    if not bool((has_top_k | has_top_p).any()):
        return lowest
    ordered = scaled.sort(dim=1, descending=True).values
    last = torch.where(has_top_k, truncation.top_k, vocabulary).clamp(max=vocabulary) - 1
    lowest = torch.maximum(lowest, ordered.gather(1, last.unsqueeze(1)).squeeze(1))
    if not bool(has_top_p.any()):
        return lowest
    probabilities = ordered.masked_fill(ordered < lowest.unsqueeze(1), -torch.inf).softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    last = ((before < truncation.top_p.unsqueeze(1)).sum(dim=1) - 1).clamp(min=0)
    of_top_p = ordered.gather(1, last.unsqueeze(1)).squeeze(1)
    return torch.where(has_top_p, torch.maximum(lowest, of_top_p), lowest)
