"""Merges a low-rank adapter into the weights of its model. (`primerl.train.adapters.lora` makes adapters.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "default"
"""Name of the adapter within peft's layers."""


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
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if not is_adapter(name)}
    for name, layer in layers.items():
        if f"{name}.weight" not in merged:
            continue
        weight = merged[f"{name}.weight"]
        a, b = (state[f"{name}.lora_{part}.{NAME}.weight"] for part in "AB")
        whole = weight.float() + layer.scaling[NAME] * (b.float() @ a.float())
        # On the CPU, where they are saved from: a GPU has no room for a second model.
        merged[f"{name}.weight"] = whole.to(weight.dtype).cpu()
    return merged
