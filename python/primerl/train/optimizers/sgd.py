"""Stochastic gradient descent, with momentum if asked for. Weight decay is added to the gradient, as torch does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from primerl.train.optimizers import NamedParameter, groups

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from primerl.train.settings import OptimConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    momentum: float = 0.0
    nesterov: bool = False

    def check(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}; it must be in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is true, but momentum is 0; set momentum")


def build(parameters: list[NamedParameter], config: OptimConfig, options: Options) -> list[Optimizer]:
    import torch

    made = groups(parameters)
    return [torch.optim.SGD(made, lr=config.lr, momentum=options.momentum, nesterov=options.nesterov)]
