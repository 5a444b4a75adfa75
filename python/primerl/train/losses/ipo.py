"""A symmetric trust region: tokens whose probability moved too far, up or down, are masked whatever their advantage is.

With p the trainer's and q the engine's probability of the token, A its advantage and rho = p / q:

    loss = -keep * A * rho + kl_tau * (log rho)^2
    keep = 0 if |p - q| > threshold, else 1

It is prime-rl's `ipo` (`ipo_loss_fn`). The bound on the difference of probabilities is DPPO's (`dppo`,
arXiv:2602.04879), which masks only in the direction that the advantage pushes to.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl.train.losses import PolicyLoss, Tokens
from primerl.train.losses.dppo import moved, trusted


@dataclass(frozen=True, kw_only=True)
class Options:
    threshold: float = 0.1
    """Tokens are masked once their probability rose or fell by more than this."""
    kl_tau: float = 1e-3
    """Weight of the squared log-ratio, which keeps trainer and engine together."""

    def check(self) -> None:
        for name in ("threshold", "kl_tau"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0.0")


def policy_loss(tokens: Tokens, options: Options) -> PolicyLoss:
    return trusted(tokens, moved(tokens).abs() > options.threshold, options.kl_tau)
