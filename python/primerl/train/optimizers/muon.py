"""Muon for the matrices within layers, AdamW for embeddings, output layer, norms and biases.

Muon replaces a matrix's momentum by the nearest orthogonal one (Jordan et al., "Muon", 2024,
https://kellerjordan.github.io/posts/muon/). Its steps are scaled to the size of AdamW's, by 0.2 * sqrt(the longer
side) (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982), so that one `lr` serves both. The experts
of a mixture, which one tensor holds, are matrices of their own.

Where matrices are divided among ranks, so is their momentum; each is gathered to be made orthogonal, one after the
other, on every rank. Experts are whole on the rank that holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from primerl.train.optimizers import NamedParameter, adamw, groups

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from primerl.train.settings import OptimConfig


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
    from primerl.train.distributed.fsdp import local

    whole = [parameter for parameter in parameters if parameter.matrix and parameter.tensor.dim() == 2]
    stacks = [parameter for parameter in parameters if parameter.matrix and parameter.tensor.dim() == 3]
    chosen = {id(parameter) for parameter in (*whole, *stacks)}
    rest = [parameter for parameter in parameters if id(parameter) not in chosen]
    slices = [(parameter.tensor, _slices(parameter)) for parameter in stacks]
    matrices = groups([*whole, *(matrix for _, own in slices for matrix in own)])
    made = adamw.build(rest, config)
    if matrices:
        muon = _muon()(
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
                gradient = None if stack.grad is None else local(stack.grad)
                for index, matrix in enumerate(own):
                    matrix.tensor.grad = None if gradient is None else gradient[index]

        muon.register_step_pre_hook(hand_on)
        made.append(muon)
    return made


def _slices(stack: NamedParameter) -> list[NamedParameter]:
    """Parameters that share the stack's memory, of the experts that this rank holds."""
    import torch

    from primerl.train.distributed.fsdp import first_row, local

    def part(index: int, tensor: Tensor) -> NamedParameter:
        parameter = torch.nn.Parameter(tensor)
        return NamedParameter(f"{stack.name}[{first + index}]", parameter, stack.weight_decay, matrix=True)

    first = first_row(stack.tensor)
    return [part(index, tensor) for index, tensor in enumerate(local(stack.tensor.detach()).unbind(0))]


@cache
def _muon() -> Any:
    """torch's Muon, for matrices of which a rank holds some rows too."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    from primerl.train.distributed.fsdp import whole

    class Muon(torch.optim.Muon):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            divided = []
            for group in self.param_groups:
                for parameter in group["params"]:
                    if isinstance(parameter, DTensor) and parameter.grad is not None:
                        divided.append((group, parameter, parameter.grad))
                        parameter.grad = None
            answer = super().step(closure)  # type: ignore[no-untyped-call]
            for group, parameter, gradient in divided:
                self._step_divided(group, parameter, gradient)
            return answer

        def _step_divided(self, group: dict[str, Any], parameter: Any, gradient: Tensor) -> None:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            # torch's own step on the whole matrix, without momentum and decay, from 0: what is to be added.
            matrix = torch.nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
            matrix.grad = whole(update)
            given = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
            once = torch.optim.Muon([matrix], momentum=0.0, nesterov=False, weight_decay=0.0, **given)
            once.step()  # type: ignore[no-untyped-call]
            added = distribute_tensor(matrix.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(added)

    return Muon
