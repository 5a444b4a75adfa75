"""IcePop: tokens on which engine and trainer disagree too much are masked, on either side.

    loss = -sg(M(rho)) * A * log p,  M(rho) = rho if min_ratio <= rho <= max_ratio, else 0

Ling team, "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop", 2025; "Every Step Evolves",
arXiv:2510.18855.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl.train.losses import PolicyLoss, Tokens


@dataclass(frozen=True, kw_only=True)
class Options:
    min_ratio: float = 0.5
    max_ratio: float = 5.0

    def check(self) -> None:
        if not 0.0 <= self.min_ratio <= 1.0 <= self.max_ratio:
            raise ValueError(
                f"min_ratio is {self.min_ratio} and args.max_ratio {self.max_ratio}; it must be 0 <= min_ratio <= 1 "
                "<= max_ratio"
            )


def policy_loss(tokens: Tokens, options: Options) -> PolicyLoss:
    ratio = tokens.log_ratio.detach().exp()
    masked = (ratio < options.min_ratio) | (ratio > options.max_ratio)
    weight = ratio.masked_fill(masked, 0.0)
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, masked)
