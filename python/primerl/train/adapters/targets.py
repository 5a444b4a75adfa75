"""Which layers of a model get an adapter.

linear layers      of attention, linear attention, feed-forward layers and shared experts: peft's `target_modules`
stacks of experts  one tensor for all experts of a layer: peft's `target_parameters`
output layer       only where the caller asks for it (`primerl serve --tinker`): it may be tied to the embedding
none               embedding, routers, kernels of convolutions, the last matrix of a Mamba layer
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primerl.train.adapters.files import READ_BY_KERNEL, is_read_by_kernel, is_targeted
from primerl.train.model.architectures import text_decoder
from primerl.train.model.experts import stacks
from primerl.train.model.families import GATED_PAIR
from primerl.train.settings import ALL_LINEAR, ConfigError, LoraConfig

log = logging.getLogger(__name__)

KEY = "model.lora."
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
"""Layers whose weights have more than two dimensions without being experts."""
RENAMED = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Last names of linear layers that peft takes for experts, where it knows the architecture as one whose experts were
linear layers once. It takes them for what they are if they are named as parameters."""


@dataclass(frozen=True)
class Targets:
    """Full names, without repetitions, in the model's order."""

    linear: list[str]
    """Linear layers."""
    experts: list[str]
    """Parameters that hold all experts of a layer."""
    mixture: bool
    """Whether the model has such parameters."""

    def for_peft(self, model: Any, *, saved: bool = False) -> dict[str, list[str]]:
        """Settings of peft for a model without adapters, with names as short as they can be. `saved`: those that peft
        reads with a model of `transformers`, which it knows by its architecture (see `RENAMED`)."""
        apart = [name for name in self.linear if saved and self.mixture and name.rsplit(".", 1)[-1] in RENAMED]
        modules = [name for name in self.linear if name not in apart]
        parameters = [*self.experts, *(f"{name}.weight" for name in apart)]
        return {
            "target_modules": _shortest(modules, [name for name, _ in model.named_modules()], 1),
            "target_parameters": _shortest(parameters, [name for name, _ in model.named_parameters()], 2),
        }


def _shortest(names: list[str], all_names: Sequence[str], parts: int) -> list[str]:
    """The last parts of the names, as is usual in adapters, if they select exactly these; else `names`."""
    last = sorted({".".join(name.split(".")[-parts:]) for name in names})
    meant = {name for name in all_names if is_targeted(name, last)}
    return last if meant == set(names) else sorted(names)


def choose(model: Any, config: LoraConfig, *, output_layer: bool = False) -> Targets:
    """`output_layer`: it gets an adapter as well. Raises ConfigError."""
    found = _Model.of(model)
    experts = found.stacks
    if config.target_modules == [ALL_LINEAR]:
        found.report()
        linear = [name for name in found.linear if name not in found.read_by_kernel]
    else:
        for target in config.target_modules:
            found.check(target)
        linear = [name for name in found.linear if is_targeted(name, config.target_modules)]
        experts = [name for name in experts if any(is_expert_target(name, one) for one in config.target_modules)]
    if experts and config.dropout:
        raise ConfigError(
            f"{KEY}dropout is {config.dropout:g}, but adapters of a mixture's experts have none, as in peft; set it "
            f"to 0, or name linear layers in {KEY}target_modules",
            f"{KEY}dropout",
        )
    if output_layer:
        head = model.get_output_embeddings()
        linear = [*linear, *(name for name, one in found.modules.items() if one is head)]
    return Targets(linear, experts, bool(found.stacks or found.others))


def is_expert_target(stack: str, target: str) -> bool:
    """Whether a name in `target_modules` means this stack: the name of its parameter, of the experts that hold it, or
    that of one of the two matrices that lie in it side by side."""
    where, _, own = stack.rpartition(".")
    names = [stack, where, *(f"{where}.{name}" for name in GATED_PAIR if own == "gate_up_proj")]
    return any(is_targeted(name, [target]) for name in names)


@dataclass(frozen=True)
class _Model:
    """What of a model can have an adapter, and what cannot."""

    modules: dict[str, torch.nn.Module]
    linear: list[str]
    read_by_kernel: list[str]
    stacks: list[str]
    others: list[str]
    """Stacks of experts that are computed by code of their own."""
    outside: set[int]
    """Ids of embedding and output layer."""

    @classmethod
    def of(cls, model: Any) -> _Model:
        outside = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
        modules = dict(model.named_modules())
        # A tower for images computes nothing when text is trained.
        inside = {id(one) for one in text_decoder(model).modules()}
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        linear = [
            name
            for name, one in modules.items()
            if isinstance(one, torch.nn.Linear) and id(one) in inside and id(one) not in outside
        ]
        known = [f"{where}.{name}" for where, _, name in stacks(model)]
        kernels = {f"{name}.weight" for name, one in modules.items() if isinstance(one, CONVOLUTIONS)}
        large = [name for name, shape in shapes.items() if len(shape) > 2 and name not in kernels]
        return cls(
            modules=modules,
            linear=linear,
            read_by_kernel=[name for name in linear if is_read_by_kernel(name, shapes)],
            stacks=known,
            others=[name for name in large if name not in known],
            outside=outside,
        )

    def report(self) -> None:
        """Logs what `all-linear` skips."""
        if self.others and not self.stacks:
            log.warning(
                "%s (and its like) gets no adapter: these experts are computed by code of their own", self.others[0]
            )
        if self.read_by_kernel:
            log.warning("%s (and its like) gets no adapter: it %s", self.read_by_kernel[0], READ_BY_KERNEL)

    def check(self, target: str) -> None:
        """Raises ConfigError for a name that stands for no layer that can have an adapter."""
        for name in self.read_by_kernel:
            if is_targeted(name, [target]):
                raise ConfigError.at(f"{KEY}target_modules", f"{name} {READ_BY_KERNEL}")
        others = [name for name in self.others if f".{target}." in f".{name}."]
        if others:
            raise ConfigError.at(
                f"{KEY}target_modules",
                f"{target!r} is a mixture's experts ({others[0]}), which transformers computes by "
                "code of their own for this architecture, so that they cannot have an adapter; omit it, or name linear "
                "layers by more of their names",
            )
        if any(is_targeted(name, [target]) for name in self.linear):
            return
        if any(is_expert_target(name, target) for name in self.stacks):
            return
        names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in self.linear}) + ["experts"] * bool(self.stacks))
        found = [(name, one) for name, one in self.modules.items() if is_targeted(name, [target])]
        if found:
            name, module = found[0]
            what = "the embedding or output layer" if id(module) in self.outside else f"a {type(module).__name__}"
            raise ConfigError.at(f"{KEY}target_modules", f"{name} is {what}, and no linear layer; there are {names}")
        raise ConfigError.at(f"{KEY}target_modules", f"no layer of the model is called {target!r}; there are {names}")
