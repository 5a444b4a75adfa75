"""RMS norms by torch's kernel: which ones, and that a model computes the same by them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from hub_folders import write_hub_folder
from primerl.train.distributed.fsdp import packed_logprobs
from primerl.train.model import norms
from primerl.train.model.packed_model import PackedSequences, load_model
from torch import Tensor


class Norm(torch.nn.Module):
    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.variance_epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * self.scaled(rows.float()).to(rows.dtype)

    def scaled(self, rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class OneMore(Norm):
    def forward(self, rows: Tensor) -> Tensor:
        return (1 + self.weight) * self.scaled(rows)


class Gated(Norm):
    def forward(self, rows: Tensor, gate: Tensor) -> Tensor:
        return super().forward(rows) * gate


class MayBeGated(Norm):
    def forward(self, rows: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(rows if gate is None else rows * gate)


class OtherEpsilon(Norm):
    def scaled(self, rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)


class Centred(Norm):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows - rows.mean(-1, keepdim=True))


def is_replaced(module: torch.nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), MethodType)


@pytest.mark.parametrize("kind", [OneMore, Gated, MayBeGated, OtherEpsilon, Centred])
def test_what_is_another_norm_computes_as_before(kind: type[Norm]) -> None:
    module = kind()
    norms.install(module)
    assert not is_replaced(module)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6, 1e-12])
def test_a_plain_norm_is_found_on_any_device(epsilon: float) -> None:
    for device in ("cpu", "meta"):
        module = Norm(epsilon).to(device)
        norms.install(module)
        assert is_replaced(module)


def test_rows_of_another_dtype_and_those_on_a_cpu_take_the_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Norm()
    norms.install(module)
    rows = torch.randn(3, 16)
    assert torch.equal(module(rows), Norm.forward(module, rows))
    monkeypatch.setattr(norms, "_on_gpu", lambda _: True)
    half = rows.bfloat16()
    assert torch.equal(module(half), Norm.forward(module, half))


def test_the_kernel_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Norm()
    norms.install(module)
    monkeypatch.setattr(norms, "_on_gpu", lambda _: True)
    rows = torch.randn(3, 16)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows), Norm.forward(module, rows))


# gpt-oss rounds once, the others before they multiply by the weight.
@pytest.mark.parametrize("name", ["Qwen3-4B-Instruct-2507", "GLM-4.7", "gpt-oss-20b"])
def test_a_model_computes_the_same_by_the_kernel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(write_hub_folder(tmp_path / "model", name))
    other = copy.deepcopy(model)
    expected = computed(model)
    monkeypatch.setattr(norms, "_on_gpu", lambda _: True)
    calls: list[Any] = []
    monkeypatch.setattr(norms, "rms_norm", lambda *given: (calls.append(given), torch.rms_norm(*given))[1])
    found = computed(other)
    assert calls
    for one, own in zip(found, expected, strict=True):
        torch.testing.assert_close(one, own, atol=2e-5, rtol=1e-4)


def computed(model: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradients of their sum."""
    token_ids = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(0))
    packed = PackedSequences.from_lengths([25, 15])
    logprobs, *_ = packed_logprobs(model, token_ids, packed, torch.tensor([*range(1, 25), *range(26, 40)]))
    logprobs.sum().backward()
    gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return logprobs.detach(), torch.cat(gradients)
