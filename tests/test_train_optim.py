"""Schedules by their formulas; AdamW and clipping against torch's own parts."""

from __future__ import annotations

import pytest
import torch
from primerl.train.config import OptimConfig
from primerl.train.optim import Optimizer, learning_rate


def test_constant_schedule_with_and_without_warmup() -> None:
    assert [learning_rate(OptimConfig(lr=0.5), step, 10) for step in (1, 5, 10)] == [0.5] * 3
    config = OptimConfig(lr=0.5, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in (1, 2, 4, 9)] == [0.125, 0.25, 0.5, 0.5]


def test_linear_schedule_ends_at_its_share() -> None:
    config = OptimConfig(lr=4e-3, schedule="linear", warmup_steps=20, final_lr_ratio=0.1)
    for step in (1, 10, 20, 300, 600):
        expected = 4e-3 * min(1, step / 20) * (1 - 0.9 * step / 600)
        assert learning_rate(config, step, 600) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(config, 600, 600) == pytest.approx(4e-4)


def test_step_clips_and_updates_like_adamw() -> None:
    config = OptimConfig(lr=0.1, weight_decay=0.3, max_norm=0.5, betas=(0.8, 0.9))
    ours = torch.nn.Parameter(torch.tensor([[1.0, -2.0, 3.0]]))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = Optimizer([("layer.weight", ours)], config, 10)
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), weight_decay=0.3, foreach=False)
    for step in (1, 2, 3):
        gradient = torch.tensor([[3.0, 0.0, 4.0]]) * step
        ours.grad = gradient.clone()
        update = optimizer.step(step)
        assert update.grad_norm == pytest.approx(5.0 * step)
        assert update.lr == 0.1
        assert update.zero_grad_ratio == pytest.approx(1 / 3)
        assert ours.grad is None
        theirs.grad = gradient * 0.5 / (5.0 * step)
        adamw.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = Optimizer([("bias", parameter)], OptimConfig(lr=0.1), 10)
    parameter.grad = torch.tensor([bad, 1.0])
    norm = optimizer.step(1).grad_norm
    assert not norm < float("inf")
    assert parameter.tolist() == [1.0, 2.0]


def test_one_value_that_is_not_finite_is_seen() -> None:
    # Finite, although their norm is not.
    large = torch.nn.Parameter(torch.full((4,), 3e38))
    other = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer([("large", large), ("other", other)], OptimConfig(), 10)
    assert optimizer.has_finite_parameters()
    for bad in (float("nan"), float("inf"), -float("inf")):
        with torch.no_grad():
            other[1, 0] = bad
        assert not optimizer.has_finite_parameters()
