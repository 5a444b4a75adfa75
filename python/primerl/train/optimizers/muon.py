"""Muon for the matrices within layers, AdamW for embeddings, output layer, norms and biases.

Muon replaces a matrix's momentum by the nearest orthogonal one (Jordan et al., "Muon", 2024,
https://kellerjordan.github.io/posts/muon/). Its steps are scaled to the size of AdamW's, by 0.2 * sqrt(the longer
side) (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982), so that one `lr` serves both. The experts
of a mixture, which one tensor holds, are matrices of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from primerl.train.config import OptimConfig
from primerl.train.optimizers import NamedParameter, adamw, groups

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Options:
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    """Newton-Schulz iterations."""

    def check(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}; it must be in [0, 1)")
        if not 1 <= self.ns_steps < 100:
            raise ValueError(f"ns_steps is {self.ns_steps}; it must be in 1..99")


def build(parameters: list[NamedParameter], config: OptimConfig, options: Options) -> list[Optimizer]:
    import torch

    whole = [parameter for parameter in parameters if parameter.matrix and parameter.tensor.dim() == 2]
    stacks = [parameter for parameter in parameters if parameter.matrix and parameter.tensor.dim() == 3]
    chosen = {id(parameter) for parameter in (*whole, *stacks)}
    rest = [parameter for parameter in parameters if id(parameter) not in chosen]
    slices = [(parameter.tensor, _slices(parameter)) for parameter in stacks]
    matrices = groups([*whole, *(matrix for _, own in slices for matrix in own)])
    made = adamw.build(rest, config)
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            lr=config.lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            ns_steps=options.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )

        def hand_on(*_: Any) -> None:
            """The gradient of a stack, to its matrices."""
            for stack, own in slices:
                for index, matrix in enumerate(own):
                    matrix.tensor.grad = None if stack.grad is None else stack.grad[index]

        muon.register_step_pre_hook(hand_on)
        made.append(muon)
    return made


def _slices(stack: NamedParameter) -> list[NamedParameter]:
    """Parameters that share the stack's memory."""
    import torch

    def part(index: int, tensor: Tensor) -> NamedParameter:
        parameter = torch.nn.Parameter(tensor)
        return NamedParameter(f"{stack.name}[{index}]", parameter, stack.weight_decay, matrix=True)

    return [part(index, tensor) for index, tensor in enumerate(stack.tensor.detach().unbind(0))]
