"""Losses of the Tinker API. Each is a **sum** over tokens, never a mean: clients own the normalisation.

With p the policy's log-probability of a target, q the sampler's, A the advantage, r = exp(p - q), and clip(r) between
`clip_low_threshold` and `clip_high_threshold`:

    cross_entropy        - sum w p                             w may be negative, as custom losses of clients need it
    importance_sampling  - sum r A
    ppo                  - sum min(r A, clip(r) A)             Schulman et al., arXiv:1707.06347
    cispo                - sum sg(clip(r)) p A                 MiniMax-M1, arXiv:2506.13585
    dro                  - sum (p A - beta / 2 (p - q)^2)      Richemond et al., arXiv:2405.19107
    gspo                 as ppo with r = exp(mean of p - q over `sequence_ratio_mask`) for the whole sequence, each
                         token with its own gradient           GSPO-token of Zheng et al., arXiv:2507.18071
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Columns = Mapping[str, Tensor]
"""Inputs of one datum by name, each of the shape of its targets."""
Config = Mapping[str, float]

MOST_LOG_RATIO = 30.0
"""Nats; above it exp() of a ratio that can only be a mistake would overflow."""


class LossInputError(ValueError):
    """The client's request names an unknown loss, or lacks or misshapes an input. The message says which."""


class NotFoundError(LossInputError):
    """It names a saved state, or a model, that is not here."""


def cross_entropy(p: Tensor, columns: Columns, config: Config) -> Tensor:
    return -columns["weights"] * p


def importance_sampling(p: Tensor, columns: Columns, config: Config) -> Tensor:
    return -_ratio(p, columns) * columns["advantages"]


def ppo(p: Tensor, columns: Columns, config: Config) -> Tensor:
    return _clipped(_ratio(p, columns), columns["advantages"], config)


def cispo(p: Tensor, columns: Columns, config: Config) -> Tensor:
    ratio = _ratio(p, columns).detach().clamp(*_bounds(config))
    return -ratio * p * columns["advantages"]


def dro(p: Tensor, columns: Columns, config: Config) -> Tensor:
    beta = config.get("beta", 0.05)
    return -(p * columns["advantages"] - beta / 2 * (p - columns["logprobs"]) ** 2)


def gspo(p: Tensor, columns: Columns, config: Config) -> Tensor:
    inside = columns["sequence_ratio_mask"] != 0
    if not bool(inside.any()):
        return p * 0.0
    mean = (p - columns["logprobs"])[inside].mean().detach()
    # The value is the sequence's ratio, the gradient each token's own.
    ratio = torch.exp(mean.clamp(max=MOST_LOG_RATIO) + p - p.detach())
    return torch.where(inside, _clipped(ratio, columns["advantages"], config), p * 0.0)


def _ratio(p: Tensor, columns: Columns) -> Tensor:
    return torch.exp((p - columns["logprobs"]).clamp(max=MOST_LOG_RATIO))


def _bounds(config: Config) -> tuple[float, float]:
    return config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)


def _clipped(ratio: Tensor, advantages: Tensor, config: Config) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(*_bounds(config)) * advantages)


Loss = Callable[[Tensor, Columns, Config], Tensor]
_OF_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, tuple[Loss, tuple[str, ...], frozenset[str]]] = {
    "cross_entropy": (cross_entropy, ("weights",), frozenset()),
    "importance_sampling": (importance_sampling, _OF_POLICY, frozenset()),
    "ppo": (ppo, _OF_POLICY, frozenset({"clip_low_threshold", "clip_high_threshold"})),
    "cispo": (cispo, _OF_POLICY, frozenset({"clip_low_threshold", "clip_high_threshold"})),
    "dro": (dro, _OF_POLICY, frozenset({"beta"})),
    "gspo": (gspo, (*_OF_POLICY, "sequence_ratio_mask"), frozenset({"clip_low_threshold", "clip_high_threshold"})),
}
"""By name: the function, the columns that it reads, the keys of its config."""


def check(name: str, config: Mapping[str, object]) -> tuple[Loss, tuple[str, ...]]:
    """The loss and its columns. Raises LossInputError."""
    if name not in LOSSES:
        why = ""
        if name == "stable_reinforce":
            why = " (its formula is not public; use importance_sampling, ppo or cispo, with the same data)"
        raise LossInputError(f"loss_fn {name!r} is not known here{why}; known: {', '.join(LOSSES)}")
    loss, columns, keys = LOSSES[name]
    unknown = sorted(config.keys() - keys)
    if unknown:
        raise LossInputError(
            f"loss_fn_config: {name} has no {unknown[0]!r}; it has: {', '.join(sorted(keys)) or 'none'}"
        )
    for key, value in config.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise LossInputError(f"loss_fn_config: {key} is {value!r}; it has to be a number")
    return loss, columns
