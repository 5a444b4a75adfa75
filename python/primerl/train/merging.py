"""The state of a model with a low-rank adapter: merged, as the model it stands for, and the adapter alone. Of a model
without one both are the model's own state. (`primerl.train.lora` makes adapters; this needs no peft.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "default"
"""Of the adapter within peft's layers."""


def is_adapter(name: str) -> bool:
    """Of a parameter."""
    return ".lora_A." in name or ".lora_B." in name


def lora_layers(model: Any) -> dict[str, Any]:
    """peft's layers by name; none where the model has no adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def merged_state(model: Any) -> dict[str, Tensor]:
    """The state of the model with its adapter merged into it, under the names it has without one; of a model without
    an adapter its own state."""
    layers = lora_layers(model)
    if not layers:
        own: dict[str, Tensor] = model.state_dict()
        return own
    state = {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in model.state_dict().items()
        if not is_adapter(name)
    }
    for name, layer in layers.items():
        weight = state[f"{name}.weight"]
        delta = layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight
        state[f"{name}.weight"] = (weight.float() + layer.scaling[NAME] * delta.float()).to(weight.dtype)
    return state


def trained_state(model: Any) -> dict[str, Tensor]:
    """What of the model a checkpoint has to hold: the adapter, or all of a model without one."""
    state: dict[str, Tensor] = model.state_dict()
    if not lora_layers(model):
        return state
    return {name: state[name] for name, _ in model.named_parameters() if is_adapter(name)}


def load_trained_state(model: Any, state: dict[str, Tensor]) -> None:
    """Raises ValueError or RuntimeError when it is of another model or adapter."""
    if not lora_layers(model):
        if any(map(is_adapter, state)):
            raise ValueError("it holds an adapter; set model.lora as it was")
        model.load_state_dict(state)
        return
    expected = trained_state(model)
    other = sorted(state.keys() ^ expected.keys())
    other += sorted(name for name in state.keys() & expected.keys() if state[name].shape != expected[name].shape)
    if other:
        raise ValueError(f"{other[0]} is missing, unknown or of another shape; set model.lora as it was")
    model.load_state_dict(state, strict=False)
