"""Policy loss: DPPO's binary mask with a squared log-ratio to the engine, and what is measured of it.

For every sampled token, with p the trainer's and q the engine's probability of it (both at the sampling temperature),
A its advantage and rho = p / q:

    loss = -keep * A * rho + tau * (log rho)^2
    keep = 0 if A > 0 and p - q > mask_high, or A <= 0 and p - q < -mask_low;  else 1

The gradient goes through rho and log rho, not through `keep`. The loss of a step is the sum over all sampled tokens of
all data ranks, divided by their number. The mask on the difference of probabilities is DPPO's, binary total-variation
form (Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879), in place of PPO's clip
on their ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from primerl.train.config import LossConfig
from primerl.train.truncation import Truncation, truncate


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, in nats; both [N].

    Args:
        logits: [N, V] fp32.
        token_ids: [N] int64.
        temperatures: [N] fp32, above 0; the engine sampled from softmax(logits / temperature).
        truncation: What the engine left out of it; None where it left out nothing.
    """
    scaled = logits / temperatures.unsqueeze(1)
    if truncation is not None:
        scaled = truncate(scaled, token_ids, truncation)
    log_softmax = torch.log_softmax(scaled, dim=-1)
    with torch.no_grad():
        # `entr` of what was left out is 0, where -inf times 0 is not.
        entropy = torch.special.entr(log_softmax.exp()).sum(dim=-1)
    return log_softmax.gather(1, token_ids.unsqueeze(1)).squeeze(1), entropy


@dataclass(frozen=True, slots=True)
class LossStatistics:
    """Sums over tokens, so that micro-batches and ranks add up; see `LossStatistics.means` for what they become."""

    values: Tensor  # [len(NAMES)] fp64

    NAMES: ClassVar = (
        "tokens",
        "loss",
        "mismatch_kl",
        "abs_log_ratio",
        "entropy",
        "positive",
        "masked_positive",
        "masked_negative",
    )

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> LossStatistics:
        # MPS aside, every device torch trains on has fp64, and sums of millions of tokens want it.
        return cls(torch.zeros(len(cls.NAMES), dtype=torch.float64, device=device))

    def __add__(self, other: LossStatistics) -> LossStatistics:
        return LossStatistics(self.values + other.values)

    def means(self) -> dict[str, float]:
        """Metrics under their published names; masked shares are of the tokens with that sign of advantage."""
        sums = dict(zip(self.NAMES, self.values.tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        negative = sums["tokens"] - sums["positive"]
        return {
            "loss/mean": sums["loss"] / tokens,
            "mismatch_kl/all/mean": sums["mismatch_kl"] / tokens,
            "mismatch_abs_log_ratio/all/mean": sums["abs_log_ratio"] / tokens,
            "entropy/all/mean": sums["entropy"] / tokens,
            "masked/all/mean": (sums["masked_positive"] + sums["masked_negative"]) / tokens,
            "masked_advantage_positive/mean": sums["masked_positive"] / max(sums["positive"], 1.0),
            "masked_advantage_negative/mean": sums["masked_negative"] / max(negative, 1.0),
        }


def policy_loss(
    logprobs: Tensor, engine_logprobs: Tensor, advantages: Tensor, entropy: Tensor, config: LossConfig
) -> tuple[Tensor, LossStatistics]:
    """Sum (not mean) of the loss over N tokens, with its statistics. All arguments are [N] fp32."""
    log_ratio = logprobs - engine_logprobs
    with torch.no_grad():
        moved = logprobs.exp() - engine_logprobs.exp()
        positive = advantages > 0
        masked = torch.where(positive, moved > config.mask_high, moved < -config.mask_low)
    # Masked before the exponential and not by a factor 0 after it: a masked token's ratio may overflow, and 0 times
    # infinity, here or in the gradient of `exp`, would make the whole loss NaN.
    ratio = log_ratio.masked_fill(masked, 0.0).exp()
    gain = (advantages * ratio).masked_fill(masked, 0.0)
    token_loss = config.kl_tau * log_ratio.square() - gain
    with torch.no_grad():
        columns = [
            torch.ones_like(log_ratio),
            token_loss,
            # KL(engine || trainer) by the k3 estimator (Schulman, "Approximating KL divergence", 2020).
            torch.expm1(log_ratio) - log_ratio,
            log_ratio.abs(),
            entropy,
            positive,
            masked & positive,
            masked & ~positive,
        ]
        statistics = LossStatistics(torch.stack([column.double().sum() for column in columns]))
    return token_loss.sum(), statistics
