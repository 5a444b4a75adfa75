"""PPO's clipped ratio with bounds of its own on either side, as in GRPO and DAPO.

    loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)
    with dual_clip = c > 1, where A < 0:  loss = -max(that min, c * A)

PPO: Schulman et al., arXiv:1707.06347. GRPO: Shao et al., arXiv:2402.03300. Asymmetric bounds ("clip higher"): DAPO,
Yu et al., arXiv:2503.14476. Dual clip, which bounds what one token with a negative advantage can do: Ye et al.,
arXiv:1912.09729.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl.train.losses import PolicyLoss, Tokens


@dataclass(frozen=True, kw_only=True)
class Options:
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """Bound c on the ratio of tokens with a negative advantage; none if unset."""

    def check(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1")


def check_bounds(clip_low: float, clip_high: float) -> None:
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low is {clip_low}; it must be in [0, 1]")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high is {clip_high}; it must be at least 0")


def policy_loss(tokens: Tokens, options: Options) -> PolicyLoss:
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    ratio = log_ratio.detach().exp()
    # Where the minimum is the clipped term, the loss is a constant: masked, with that constant put in. (Not by
    # `minimum`: the gradient of the other term is 0 times a ratio that may have overflowed.)
    above = (advantages > 0) & (ratio > 1.0 + options.clip_high)
    below = (advantages < 0) & (ratio < 1.0 - options.clip_low)
    masked = above | below
    bounded = log_ratio.new_full((), 1.0 - options.clip_low).where(below, 1.0 + options.clip_high)
    if options.dual_clip is not None:
        far = (advantages < 0) & (ratio > options.dual_clip)
        masked = masked | far
        bounded = bounded.masked_fill(far, options.dual_clip)
    inside = log_ratio.masked_fill(masked, 0.0).exp()
    return PolicyLoss(-advantages * bounded.where(masked, inside), masked)
