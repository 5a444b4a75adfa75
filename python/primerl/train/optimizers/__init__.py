"""Optimizers, one file each: `optim.type` is the name of a file here, `optim.args` its `Options`.

A file has

    Options                              a frozen dataclass: settings besides `lr`, `betas`, `eps`, `weight_decay`
    build(parameters, config, options)   torch optimizers that hold each parameter once

and nothing else has to list it. A package of its own offers the same as an entry point in the group
`primerl.optimizers`, or is named as `module:name` (`primerl.train.registry`). The trainer sets the learning rate of all
parameter groups at each step, to that of the schedule. The files import torch where they use it, so that a config is
checked without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from primerl.train.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

    from primerl.train.settings import OptimConfig


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One tensor to update."""

    name: str
    tensor: Tensor
    weight_decay: float
    matrix: bool
    """A matrix, or a stack of them, within a layer: no embedding, output layer, norm or bias."""


def groups(parameters: Iterable[NamedParameter]) -> list[dict[str, Any]]:
    """Parameter groups of equal weight decay, with the parameters' names, under which their state is saved."""
    by_decay: dict[float, list[tuple[str, Tensor]]] = {}
    for parameter in parameters:
        by_decay.setdefault(parameter.weight_decay, []).append((parameter.name, parameter.tensor))
    return [{"params": tensors, "weight_decay": decay} for decay, tensors in by_decay.items()]


REGISTRY = Registry(__name__, "primerl.optimizers", "build")


def build(parameters: list[NamedParameter], config: OptimConfig) -> list[TorchOptimizer]:
    """Raises ConfigError."""
    function, given = REGISTRY.load(config.type, config.args, "optim.")
    return function(parameters, config, given)  # type: ignore[no-any-return]
