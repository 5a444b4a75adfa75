"""How a decoder's layers run: what the backward pass recomputes, and whether they are compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from primerl.train.model.architectures import decoder_layers
from primerl.train.model.packed_model import ModelError

KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""Operators whose results selective checkpointing keeps, since they take most of the time; the rest is recomputed."""


def prepare(model: Any, activation_checkpointing: str, compile_layers: bool, backend: str = "inductor") -> None:
    """Raises ModelError if the model does not support it."""
    if activation_checkpointing != "none":
        how: dict[str, Any] = {"use_reentrant": False}
        if activation_checkpointing == "selective":
            how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        try:
            model.gradient_checkpointing_enable(how)
        except ValueError as error:
            raise ModelError(f"activation_checkpointing: {error}") from error
    if compile_layers:
        for layer in layers(model):
            # Lengths differ from micro-batch to micro-batch.
            layer.compile(dynamic=True, backend=backend)


def layers(model: Any) -> list[torch.nn.Module]:
    """The decoder's layers. Raises ModelError."""
    found = decoder_layers(model)
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no list of layers, which compile and several ranks need; omit compile, "
            "and train on one rank"
        )
    return found


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    attention = getattr(operator, "namespace", "") == "torch_attn"  # of torch.nn.attention.varlen
    return CheckpointPolicy.MUST_SAVE if operator in KEPT or attention else CheckpointPolicy.PREFER_RECOMPUTE
