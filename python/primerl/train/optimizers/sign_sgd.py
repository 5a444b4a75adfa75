"""signSGD (Bernstein et al. 2018, arXiv:1802.04434): `w = w - lr * (sign(gradient) + weight_decay * w)`.

Nothing is kept from step to step. Weight decay is decoupled, as in AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from primerl.train.optimizers import NamedParameter, groups

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from primerl.train.settings import OptimConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """It has none."""


def build(parameters: list[NamedParameter], config: OptimConfig, options: Options) -> list[Optimizer]:
    import torch

    class SignSGD(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                        parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

    return [SignSGD(groups(parameters), {"lr": config.lr})]
