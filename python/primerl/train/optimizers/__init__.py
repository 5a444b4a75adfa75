"""Optimizers, one file each: `optim.type` is the name of a module here, `optim.args` its `Options`.

A module has

    Options                         a frozen dataclass: what may be set beside `lr`, `betas`, `eps` and `weight_decay`
    build(parameters, config, options)   torch optimizers that hold each parameter once

and nothing else has to know of it. The learning rates of the groups a module makes are set each step, to that of the
schedule. The modules import torch where they use it, so that a config is checked without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from primerl.train.registry import module_of, options_of
from primerl.train.settings import OptimConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer


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


def options(kind: str, args: dict[str, Any], where: str = "optim.") -> Any:
    """The `Options` of the optimizer `kind` with `args` set. Raises ConfigError, naming the key below `where`."""
    return options_of(_module(kind, where), args, where)


def build(parameters: list[NamedParameter], config: OptimConfig) -> list[TorchOptimizer]:
    """Raises ConfigError."""
    given = options(config.type, config.args)
    return _module(config.type, "optim.").build(parameters, config, given)  # type: ignore[no-any-return]


def _module(kind: str, where: str) -> ModuleType:
    return module_of(__name__, __path__, kind, where)
