"""GSPO: clipping by the ratio of the whole sequence.

With s the geometric mean of rho over the sampled tokens of the token's sequence, and sg for "no gradient through it":

    r    = sg(s) * p / sg(p)                  (its value is s, its gradient each token's own)
    loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071; this is its GSPO-token form, which equals GSPO
where all tokens of a sequence have one advantage. A sequence is a sample as it was packed. The paper divides by the
sequence's length; choose so by `orchestrator.algorithm.length_normalization`.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl.train.losses import PolicyLoss, Tokens
from primerl.train.losses.clip import check_bounds


@dataclass(frozen=True, kw_only=True)
class Options:
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def check(self) -> None:
        check_bounds(self.clip_low, self.clip_high)


def policy_loss(tokens: Tokens, options: Options) -> PolicyLoss:
    log_sequence_ratio = tokens.sequence_mean(tokens.log_ratio.detach())
    ratio, advantages = log_sequence_ratio.exp(), tokens.advantages
    above = (advantages > 0) & (ratio > 1.0 + options.clip_high)
    below = (advantages < 0) & (ratio < 1.0 - options.clip_low)
    masked = above | below
    bounded = ratio.new_full((), 1.0 - options.clip_low).where(below, 1.0 + options.clip_high)
    with_gradient = log_sequence_ratio + tokens.logprobs - tokens.logprobs.detach()
    inside = with_gradient.masked_fill(masked, 0.0).exp()
    return PolicyLoss(-advantages * bounded.where(masked, inside), masked)
