"""RMS norms by torch's own kernel on a GPU, where they are what `torch.nn.functional.rms_norm` computes:

    y = weight * x / sqrt(mean(x^2) + eps)        in fp32, rounded once

`transformers` writes them out in six operators forward and more backward, each of which reads and writes the row of
tokens; of an SFT step of a Qwen3-0.6B in bfloat16 they took a third of the time. A norm is tried when the model is
loaded, not known by name: some add 1 to their weights, some take a gate. Those, and all on a CPU, compute as before.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

EPSILON = ("variance_epsilon", "eps", "epsilon")
"""Names that models have for what is added to the mean."""
FOUND = "primerl_epsilon"
"""Attribute of a norm that uses the kernel: what is added to its mean. Looked for once, not in each forward pass."""
APART = 1e-5
"""How far, as a share, the trial's results in fp32 may be from the norm's own."""


def install(model: Any) -> None:
    """Norms of the model that equal torch's use its kernel from now on, on GPUs."""
    equal: dict[tuple[Any, ...], bool] = {}
    for module in model.modules():
        epsilon = _epsilon(module)
        if epsilon is None:
            continue
        kind = (type(module), module.weight.shape, epsilon)
        if kind not in equal:
            equal[kind] = _is_equal(module, epsilon)
        if equal[kind]:
            setattr(module, FOUND, epsilon)
            module.forward = MethodType(_by_kernel, module)


def _by_kernel(self: Any, hidden_states: Tensor) -> Tensor:
    # Another dtype than the weight's is what the kernel does not take.
    if not _on_gpu(hidden_states) or hidden_states.dtype != self.weight.dtype:
        return type(self).forward(self, hidden_states)  # type: ignore[no-any-return]
    return rms_norm(hidden_states, self.weight.shape, self.weight, getattr(self, FOUND))


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _epsilon(module: Any) -> float | None:
    """That of a module that may be such a norm, going by what it is made of."""
    made_of = [*module._parameters, *module._buffers, *module._modules]
    if made_of != ["weight"] or module._parameters.get("weight") is None or module.weight.dim() != 1:
        return None
    # Others take a gate, some of them only where there is one.
    if len(signature(type(module).forward).parameters) != len(("self", "hidden_states")):
        return None
    found = [value for name in EPSILON if isinstance(value := getattr(module, name, None), float)]
    return found[0] if len(found) == 1 else None


def _is_equal(module: Any, epsilon: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(module.weight.shape, generator=generator)
    rows = torch.randn(4, len(weight), generator=generator)
    # So small that it shows what is added to the mean.
    rows[2:] *= epsilon**0.5
    with torch.no_grad():
        try:
            own = torch.func.functional_call(module, {"weight": weight}, (rows,))
        except Exception:  # noqa: BLE001 (code of any model)
            return False
        expected = rms_norm(rows, weight.shape, weight, epsilon)
    if not isinstance(own, Tensor) or own.shape != expected.shape:
        return False
    return bool(((own - expected).norm(dim=1) <= APART * expected.norm(dim=1)).all())
