"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101), torch's fused one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from primerl.train.optimizers import NamedParameter, groups

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from primerl.train.settings import OptimConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """`optim.betas` and `optim.eps` are all there is."""


def build(parameters: list[NamedParameter], config: OptimConfig, _options: Options | None = None) -> list[Optimizer]:
    import torch

    made = groups(parameters)
    return [torch.optim.AdamW(made, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)] if made else []
