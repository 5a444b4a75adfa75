"""Updates of gpt-oss. vLLM's reload collects what weight loaders are given, and the loader of this model copies stacks
of experts and attention sinks into parameters without one, which have no memory during a reload: the old weights would
stay. So experts come one by one, which have a loader, and sinks are copied when the reload has ended.

Needs torch only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

MODEL = "GptOssForCausalLM"
STACK = re.compile(r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")
SINKS = ".sinks"


def for_reload(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the model's `load_weights` takes them during a reload."""
    for name, tensor in tensors:
        stack = STACK.fullmatch(name) if type(model).__name__ == MODEL else None
        if stack is None:
            yield name, tensor
            continue
        for expert, own in enumerate(tensor):
            yield f"{stack[1]}.{expert}.{stack[2]}", own


@torch.no_grad()
def copy_sinks(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], rank: int) -> int:
    """Copies the heads of tensor-parallel `rank`; returns how many sinks there are of this rank. After the reload."""
    if type(model).__name__ != MODEL:
        return 0
    parameters = dict(model.named_parameters())
    copied = 0
    for name, tensor in tensors:
        # vLLM calls the attention of a layer `attn`; layers of other stages are not here.
        held = parameters.get(name.replace(".self_attn.", ".attn."))
        if name.endswith(SINKS) and held is not None:
            heads = held.shape[0]
            held.copy_(tensor[rank * heads : (rank + 1) * heads])
            copied += heads
    return copied
