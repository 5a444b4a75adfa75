"""Experts of a mixture compute, one by one and grouped, what `transformers` computes; routers compute in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import packed_loss
from primerl.train.adapters.lora import add_adapter
from primerl.train.model import experts
from primerl.train.model.packed_model import load_model
from primerl.train.model.routing import routers
from primerl.train.settings import LoraConfig
from settings_helpers import filled
from torch import Tensor

SHAPES = ["qwen3_moe", "nemotron_h", "gpt_oss", "aria_text"]
"""Stacks with a gate, without, with biases and transposed, transposed."""
CHOSEN = torch.tensor([[0, 2], [2, 0], [3, 2]])
"""Experts of three tokens: none is sent to expert 1."""


def mixture(family: str, folders: Any) -> Any:
    """A module of experts."""
    model = load_model(folders(family))
    return next(module for module in model.modules() if experts.is_experts(module))


def computed(module: Any, chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What it answers, and its gradients."""
    module.zero_grad()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(chosen), module.down_proj.shape[1 + module.is_transposed], generator=generator)
    rows.requires_grad_()
    weights = torch.rand(chosen.shape, generator=generator).requires_grad_()
    answer = module(rows, chosen, weights)
    (answer * torch.randn(answer.shape, generator=generator)).sum().backward()
    found = {"rows": rows.grad, "weights": weights.grad} | {name: one.grad for name, one in module.named_parameters()}
    return answer.detach(), {name: gradient for name, gradient in found.items() if gradient is not None}


def assert_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert (one[0] - other[0]).abs().max() <= 1e-6 * one[0].abs().max()
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).norm() <= 1e-5 * gradient.norm(), name


def eager(module: Any, chosen: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, dict[str, Tensor]]:
    """By the architecture's own code in `transformers`."""
    with monkeypatch.context() as patched:
        patched.setattr(module.config, "_experts_implementation_internal", "eager")
        return computed(module, chosen)


@pytest.mark.parametrize("family", SHAPES)
def test_one_by_one_is_what_transformers_computes(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mixture(family, folders)
    assert module.config._experts_implementation == experts.EXPERTS
    own = experts._project
    projected: list[int] = []
    monkeypatch.setattr(experts, "_project", lambda *args: projected.append(len(args[1])) or own(*args))
    found = computed(module, CHOSEN)
    assert projected == [2, 2, 3, 3, 1, 1], "twice for each expert, and not at all for the one without tokens"
    assert_same(found, eager(module, CHOSEN, monkeypatch))
    assert not found[1]["down_proj"][1].any()


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("adapted", [False, True])
def test_grouped_is_one_by_one(family: str, adapted: bool, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's grouped products, which it has for a CPU too."""
    model = load_model(folders(family))
    if adapted:
        add_adapter(model, filled(LoraConfig, rank=4), folders(family), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.3)
    module = next(module for module in model.modules() if experts.is_experts(module))
    one_by_one = computed(module, CHOSEN)
    products = []
    own = experts._product
    monkeypatch.setattr(experts, "has_grouped", lambda device, dtype: True)
    monkeypatch.setattr(experts, "_product", lambda *args: products.append(args) or own(*args))
    assert_same(computed(module, CHOSEN), one_by_one)
    assert len(products) == (6 if adapted else 2)


def test_grouped_products_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert not experts.has_grouped(cpu, torch.float32), "never on a CPU"
    assert experts._try_grouped(cpu, torch.float32), "though torch has them"
    assert not experts._try_grouped(cpu, torch.float64)
    # One that computes something else.
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda rows, weights, offs: rows @ weights[0])
    assert not experts._try_grouped(cpu, torch.float32)


def test_rows_that_are_not_aligned_are_computed_one_by_one(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folders("qwen3_moe"))
    module = next(module for module in model.modules() if experts.is_experts(module))
    monkeypatch.setattr(experts, "has_grouped", lambda device, dtype: True)
    assert experts.takes_grouped(module, torch.zeros(1, 32))
    add_adapter(model, filled(LoraConfig, rank=3), folders("qwen3_moe"), seed=0)
    assert not experts.takes_grouped(module, torch.zeros(1, 32)), "3 numbers of 4 bytes"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe", "gemma4_text"])
def test_routers_compute_in_fp32(family: str, folders: Any) -> None:
    """In a bf16 model too: what they answer is that of fp32 copies of their weights and of what they are given."""
    model = load_model(folders(family), "bfloat16")
    found = routers(model)
    answered: list[tuple[Any, Tensor, tuple[Tensor, ...]]] = []
    for module, _ in found:
        module.register_forward_hook(lambda module, given, output: answered.append((module, given[0], output)))
    loss = packed_loss(model)
    loss.backward()
    assert len(answered) == len(found)
    for module, given, output in answered:
        assert given.dtype == torch.bfloat16
        assert all(part.dtype == torch.float32 for part in output if part.is_floating_point())
        weight = module.weight
        assert weight.dtype == torch.bfloat16
        assert weight.grad is not None
        logits = given.flatten(0, -2).float() @ weight.float().T
        if family == "gpt_oss":
            logits = logits + module.bias.float()
        assert any(part.shape == logits.shape and (part - logits).abs().max() < 1e-6 for part in output)
