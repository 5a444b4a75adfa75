"""The experts of a mixture: each computes the tokens that were sent to it, sorted by expert, with its adapter if it has
one.

                      on a CPU                              on a GPU
    experts           one after another, without those      grouped matrix products (`torch.nn.functional.grouped_mm`);
                      that no token was sent to             where the device has none for this dtype, as on a CPU
    router            in fp32, whatever the model computes in

`load_model` registers `experts_forward` with `transformers`, whose classes of experts call it. A class of experts that
`transformers` does not make exchangeable (Llama 4, JetMoE, LongCat) computes as before.

    y = W_e x + (alpha / rank) B_e A_e x       of expert e; W_e is never changed, nor is the product B_e A_e made

Axes in names: T tokens, K experts that a token is sent to, P = T * K pairs of them, E experts, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from primerl.train.model.routing import routers

EXPERTS = "primerl"
"""Name of the function below in `transformers`' registry."""
ADAPTERS = "primerl_adapters"
"""Attribute of a module of experts: its adapters (peft's layers) by the name of the parameter that they adapt."""
ALIGNED_BYTES = 16
"""To which rows of grouped products have to be aligned."""


class Low(NamedTuple):
    """An adapter of a stack of experts."""

    a: Tensor
    """[E, R, in]"""
    b: Tensor
    """[E, out, R]"""
    scale: float


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[T, hidden] of the tokens [T, hidden], the indices [T, K] of their experts and the weights [T, K] of these."""
    chosen, experts = top_k_index.shape[-1], top_k_index.flatten()
    order = experts.argsort(stable=True)
    counts = experts.new_zeros(self.num_experts).scatter_add_(0, experts, torch.ones_like(experts))
    rows = hidden_states.index_select(0, order // chosen)
    compute = _grouped if takes_grouped(self, rows) else _one_by_one
    weighted = compute(self, rows, counts) * top_k_weights.flatten().index_select(0, order).unsqueeze(-1)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    summed: Tensor = weighted.index_select(0, places).unflatten(0, (-1, chosen)).sum(1)
    return summed.to(hidden_states.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator] # the counts differ from call to call
def _one_by_one(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """[P, hidden] of the pairs [P, hidden], sorted by expert."""
    first, last = (_parts(self, name) for name in (_first(self), "down_proj"))
    done = []
    for expert, part in enumerate(torch.split(rows, counts.tolist())):
        if len(part):
            done.append(_project(self, _activate(self, _project(self, part, *first[expert])), *last[expert]))
    return torch.cat(done)


Part = tuple[Tensor, Tensor | None, Low | None]
"""Weight, bias and adapter of one expert."""


def _parts(self: Any, name: str) -> list[Part]:
    """Parts of each expert. Unbound at once: the gradient of one `weight[e]` would be as large as all experts."""
    weights = getattr(self, name).unbind(0)
    biases = getattr(self, f"{name}_bias").unbind(0) if self.has_bias else [None] * len(weights)
    low = adapter_of(self, name)
    if low is None:
        return [(weight, bias, None) for weight, bias in zip(weights, biases, strict=True)]
    of_experts = (Low(a, b, low.scale) for a, b in zip(low.a.unbind(0), low.b.unbind(0), strict=True))
    return list(zip(weights, biases, of_experts, strict=True))


def _project(self: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, low: Low | None) -> Tensor:
    found = linear(rows, weight.T if self.is_transposed else weight, bias)
    if low is None:
        return found
    return found + low.scale * linear(linear(rows, low.a), low.b)


def _grouped(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """The same by products of all experts at once."""
    ends = counts.cumsum(0).to(torch.int32)
    experts = None
    if self.has_bias:
        experts = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(rows))
    for name in (_first(self), "down_proj"):
        weight = getattr(self, name)
        found = _product(rows, weight if self.is_transposed else weight.transpose(1, 2), ends)
        if experts is not None:
            found = found + getattr(self, f"{name}_bias").index_select(0, experts)
        low = adapter_of(self, name)
        if low is not None:
            inner = _product(rows, low.a.transpose(1, 2), ends)
            found = found + low.scale * _product(inner, low.b.transpose(1, 2), ends)
        rows = found if name == "down_proj" else _activate(self, found)
    return rows


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[P, out] of rows [P, in], those of each expert up to its end, and weights [E, in, out]."""
    found: Tensor = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
    return found


def _first(self: Any) -> str:
    return "gate_up_proj" if self.has_gate else "up_proj"


def _activate(self: Any, rows: Tensor) -> Tensor:
    found: Tensor = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    return found


def takes_grouped(self: Any, rows: Tensor) -> bool:
    """Whether all products of these experts are computed as grouped ones."""
    if not has_grouped(rows.device, rows.dtype):
        return False
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        return False  # torch does not trace them in another dtype
    widths = {*getattr(self, _first(self)).shape[1:], *self.down_proj.shape[1:]}
    widths |= {layer.r[name] for layer in adapters_of(self).values() for name in layer.lora_A}
    return all(width * rows.itemsize % ALIGNED_BYTES == 0 for width in widths)


_HAS_GROUPED: dict[tuple[str, torch.dtype], bool] = {}


def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether grouped products work here, forward and backward: tried once for each kind of device and dtype. Never on
    a CPU, where torch would compute them one by one too, and without skipping."""
    if device.type == "cpu":
        return False
    key = (device.type, dtype)
    if key not in _HAS_GROUPED:
        _HAS_GROUPED[key] = _try_grouped(device, dtype)
    return _HAS_GROUPED[key]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _try_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    with torch.inference_mode(False), torch.enable_grad():  # an engine asks in inference mode
        rows = torch.eye(16, device=device, dtype=dtype, requires_grad=True)
        weights = torch.stack([rows.detach() * factor for factor in (1.0, 2.0, 4.0)]).requires_grad_()
        try:
            ends = torch.tensor([4, 4, 16], device=device, dtype=torch.int32)  # the second has none
            found = _product(rows, weights.transpose(1, 2), ends)
            torch.autograd.backward(found, torch.ones_like(found))
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
    expected = torch.eye(16, device=device, dtype=dtype)
    expected[4:] *= 4
    gradients = rows.grad is not None and weights.grad is not None and not weights.grad[1].any()
    return gradients and torch.equal(found.detach(), expected)


def adapters_of(experts: Any) -> dict[str, Any]:
    """peft's layers by the name of the parameter that they adapt."""
    found: dict[str, Any] = getattr(experts, ADAPTERS, {})
    return found


def adapter_of(experts: Any, name: str) -> Low | None:
    """In the dtype of the experts. In peft's layers A is [E * R, in], expert by expert, and B is [out, R * E], of which
    the experts are the last axis."""
    layer = adapters_of(experts).get(name)
    if layer is None:
        return None
    weight = getattr(experts, name)
    ((adapter, a),) = layer.lora_A.items()
    low_a = a.weight.to(weight.dtype).unflatten(0, (weight.shape[0], -1))
    low_b = layer.lora_B[adapter].weight.to(weight.dtype).unflatten(1, (-1, weight.shape[0]))
    return Low(low_a, low_b.permute(2, 0, 1).contiguous(), layer.scaling[adapter])


def is_experts(module: Any) -> bool:
    """Whether `transformers` lets the function above compute this module."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def stacks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Name, module and parameter name of each stack of experts' matrices that can have an adapter."""
    for where, module in model.named_modules():
        if is_experts(module):
            for name in (_first(module), "down_proj"):
                yield where, module, name


def register() -> None:
    """`transformers` knows `experts_forward` from now on, as an `experts_implementation`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def install(model: Any) -> None:
    """The model's routers compute in fp32, as engines do it: where they round, nearly equal experts change places."""
    if any(is_experts(module) for module in model.modules()):
        for router, _ in routers(model):
            router.forward = MethodType(_in_fp32, router)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_fp32(self: torch.nn.Module, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
    """A router's own forward pass, its parameters and what it is given in fp32 for as long."""
    own = [(module, dict(module._parameters)) for module in self.modules()]
    try:
        for module, parameters in own:
            wide: dict[str, Any] = {name: None if one is None else one.float() for name, one in parameters.items()}
            module._parameters.update(wide)  # as torch.func.functional_call does it
        return type(self).forward(self, hidden_states.float(), *given, **named)
    finally:
        for module, parameters in own:
            module._parameters.update(parameters)
