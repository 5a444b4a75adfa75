"""Merges a low-rank adapter into the weights of its model. (`primerl.train.adapters.lora` makes adapters.)"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

NAME = "default"
"""Name of the adapter within peft's layers."""


PARAMETER = "parameter_name"
"""Attribute of peft's layers around a mixture's experts: which of their parameters it is for."""


def digest_tensor(digest: str) -> Tensor:
    """A digest in hex as a tensor of bytes, to be stored among others in a file."""
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's part of a model's state."""
    return {name: tensor for name, tensor in state.items() if is_adapter(name)}


def lora_layers(model: Any) -> dict[str, Any]:
    """peft's layers by name; empty if the model has no adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def merged_state(model: Any, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state of the model with its adapter merged into it, under the names it has without one; of a model without
    an adapter its own state. `state`: the model's, or whole layers of it, where it has been gathered already."""
    state = model.state_dict() if state is None else state
    layers = lora_layers(model)
    if not layers:
        return state
    merged = {plain_name(name): tensor for name, tensor in state.items() if not is_adapter(name)}
    for name, layer in layers.items():
        adapted = adapted_tensor(name, layer)
        if adapted not in merged:
            continue
        weight = merged[adapted]
        a, b = (state[f"{name}.lora_{part}.{NAME}.weight"].float() for part in "AB")
        whole = weight.float() + layer.scaling[NAME] * _product(layer, a, b, weight)
        # On the CPU, where they are saved from: a GPU has no room for a second model.
        merged[adapted] = whole.to(weight.dtype).cpu()
    return merged


def plain_name(name: str) -> str:
    """Name of a tensor, or a module, without an adapter."""
    return re.sub(r"\.base_layer(?=\.|$)", "", name)


def adapted_tensor(name: str, layer: Any) -> str:
    """Name, without an adapter, of the tensor that peft's layer of this name adapts."""
    return f"{plain_name(name)}.{getattr(layer, PARAMETER, 'weight')}"


def _product(layer: Any, a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """B A in the shape of the weight. Of experts, whose weight is [E, out, in] or, transposed, [E, in, out], A is
    [E * R, in], expert by expert, and B is [out, R * E], of which the experts are the last axis."""
    if weight.dim() == 2:
        return b @ a
    experts, rank = weight.shape[0], a.shape[0] // weight.shape[0]
    product = b.reshape(-1, rank, experts).permute(2, 0, 1) @ a.reshape(experts, rank, -1)
    return product.transpose(1, 2) if layer.get_base_layer().is_transposed else product
