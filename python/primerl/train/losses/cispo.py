"""CISPO: the importance weight is clipped, and no token loses its gradient.

    loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log p

MiniMax, "MiniMax-M1", arXiv:2506.13585, where only the upper bound is set (`clip_low = 1` is no lower bound).
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl.train.losses import PolicyLoss, Tokens
from primerl.train.losses.clip import check_bounds


@dataclass(frozen=True, kw_only=True)
class Options:
    clip_low: float = 1.0
    clip_high: float = 4.0

    def check(self) -> None:
        check_bounds(self.clip_low, self.clip_high)


def policy_loss(tokens: Tokens, options: Options) -> PolicyLoss:
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, metrics={"clipped": weight != ratio})
