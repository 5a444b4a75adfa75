"""DPPO's binary mask with a squared log-ratio to the engine (the default).

With p the trainer's and q the engine's probability of the token, A its advantage and rho = p / q:

    loss = -keep * A * rho + kl_tau * (log rho)^2
    keep = 0 if A > 0 and p - q > mask_high, or A <= 0 and p - q < -mask_low;  else 1

The gradient goes through rho and log rho, not through `keep`. The mask on the difference of probabilities is DPPO's,
binary total-variation form (Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning",
arXiv:2602.04879), in place of PPO's clip on their ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from primerl.train.losses import PolicyLoss, Tokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Options:
    mask_low: float = 0.2
    """Tokens to be made less likely are masked once their probability fell by more than this."""
    mask_high: float = 0.2
    """Tokens to be made more likely are masked once their probability rose by more than this."""
    kl_tau: float = 1e-3
    """Weight of the squared log-ratio, which keeps trainer and engine together."""

    def check(self) -> None:
        for name in ("mask_low", "mask_high", "kl_tau"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0.0")


def policy_loss(tokens: Tokens, options: Options) -> PolicyLoss:
    by = moved(tokens)
    masked = (by > options.mask_high).where(tokens.advantages > 0, by < -options.mask_low)
    return trusted(tokens, masked, options.kl_tau)


def moved(tokens: Tokens) -> Tensor:
    """p - q, [N], without gradient."""
    return tokens.logprobs.detach().exp() - tokens.engine_logprobs.exp()


def trusted(tokens: Tokens, masked: Tensor, kl_tau: float) -> PolicyLoss:
    """The loss above, where `keep` is 0 for what is masked, [N] bool."""
    log_ratio = tokens.log_ratio
    # Masked before the exponential and not by a factor 0 after it: a masked token's ratio may overflow, and 0 times
    # infinity, here or in the gradient of `exp`, would make the whole loss NaN.
    ratio = log_ratio.masked_fill(masked, 0.0).exp()
    gain = (tokens.advantages * ratio).masked_fill(masked, 0.0)
    return PolicyLoss(kl_tau * log_ratio.square() - gain, masked)
