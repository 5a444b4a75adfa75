"""Plain importance sampling, truncated.

    loss = -sg(min(rho, max_ratio)) * A * log p

Without a bound its gradient is that of -A * rho, the unbiased estimate. The bound trades a bias for variance:
truncated importance sampling between engine and trainer (TIS), Yao et al., "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training", 2025; Ionides, "Truncated Importance Sampling", 2008.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl.train.losses import PolicyLoss, Tokens


@dataclass(frozen=True, kw_only=True)
class Options:
    max_ratio: float = 2.0
    """Larger ratios count as this one; 0 is no bound."""

    def check(self) -> None:
        if not self.max_ratio >= 0.0:
            raise ValueError(f"max_ratio is {self.max_ratio}; it must be above 0, or 0 for no bound")


def policy_loss(tokens: Tokens, options: Options) -> PolicyLoss:
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(max=options.max_ratio) if options.max_ratio else ratio
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, metrics={"clipped": weight != ratio})
