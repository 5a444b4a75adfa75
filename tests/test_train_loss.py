"""The policy loss against a slow reference in plain Python, and each case of the mask."""

from __future__ import annotations

import math

import pytest
import torch
from primerl.train.config import LossConfig
from primerl.train.loss import LossStatistics, policy_loss, token_logprobs

CONFIG = LossConfig(mask_low=0.2, mask_high=0.3, kl_tau=0.05)


def loss_of(trainer: list[float], engine: list[float], advantages: list[float]) -> tuple[torch.Tensor, LossStatistics]:
    """Loss and statistics for probabilities (not logarithms)."""
    return policy_loss(
        torch.tensor(trainer).log(),
        torch.tensor(engine).log(),
        torch.tensor(advantages),
        torch.zeros(len(trainer)),
        CONFIG,
    )


def reference(p: float, q: float, advantage: float) -> tuple[float, bool]:
    """Loss of one token, and whether its gain is masked."""
    masked = p - q > CONFIG.mask_high if advantage > 0 else p - q < -CONFIG.mask_low
    return (0.0 if masked else -advantage * p / q) + CONFIG.kl_tau * math.log(p / q) ** 2, masked


def test_against_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (0.02 + 0.96 * torch.rand(500, generator=generator) for _ in range(2))
    advantages = torch.randn(500, generator=generator)
    loss, statistics = policy_loss(p.log(), q.log(), advantages, torch.full((500,), 0.25), CONFIG)
    expected = [reference(*row) for row in zip(p.tolist(), q.tolist(), advantages.tolist(), strict=True)]
    assert loss.item() == pytest.approx(sum(value for value, _ in expected), rel=1e-5)
    means = statistics.means()
    assert means["loss/mean"] == pytest.approx(loss.item() / 500, rel=1e-5)
    assert means["masked/all/mean"] == pytest.approx(sum(masked for _, masked in expected) / 500)
    assert 0.02 < means["masked/all/mean"] < 0.9
    assert means["entropy/all/mean"] == pytest.approx(0.25)
    log_ratio = p.log() - q.log()
    assert means["mismatch_kl/all/mean"] == pytest.approx((log_ratio.exp() - log_ratio - 1).mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("p", "q", "advantage", "masked"),
    [
        (0.81, 0.5, 1.0, True),  # rose by more than mask_high, and is to rise further
        (0.79, 0.5, 1.0, False),
        (0.81, 0.5, -1.0, False),  # rose, and is to fall: the way back is open
        (0.29, 0.5, -1.0, True),  # fell by more than mask_low, and is to fall further
        (0.31, 0.5, -1.0, False),
        (0.29, 0.5, 1.0, False),  # fell, and is to rise
        (0.29, 0.5, 0.0, True),  # no advantage counts with the negative ones
        (0.5, 0.5, 1.0, False),
    ],
)
def test_mask(p: float, q: float, advantage: float, masked: bool) -> None:
    logprobs = torch.tensor([math.log(p)], requires_grad=True)
    engine = torch.tensor([math.log(q)])
    loss, statistics = policy_loss(logprobs, engine, torch.tensor([advantage]), torch.zeros(1), CONFIG)
    loss.backward()
    assert logprobs.grad is not None
    kl_gradient = 2 * CONFIG.kl_tau * math.log(p / q)
    expected = kl_gradient if masked else kl_gradient - advantage * p / q
    assert logprobs.grad.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert statistics.means()["masked/all/mean"] == float(masked)
    name = "masked_advantage_positive/mean" if advantage > 0 else "masked_advantage_negative/mean"
    assert statistics.means()[name] == float(masked)


def test_masked_token_with_overflowing_ratio_keeps_a_finite_gain() -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.tensor([-200.0]), torch.tensor([1.0]), torch.zeros(1), LossConfig(kl_tau=0.0))
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_statistics_add_up_over_micro_batches() -> None:
    p, q, advantages = [0.9, 0.2, 0.5, 0.4], [0.5, 0.5, 0.5, 0.1], [1.0, -1.0, 1.0, 2.0]
    whole = loss_of(p, q, advantages)[1].means()
    parts = loss_of(p[:1], q[:1], advantages[:1])[1] + loss_of(p[1:], q[1:], advantages[1:])[1]
    assert parts.means() == pytest.approx(whole)


def test_logprobs_are_at_the_sampling_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [1.0, 2.0, 0.5]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2]), torch.tensor([1.0, 0.5]))
    for index, (token, temperature) in enumerate([(1, 1.0), (2, 0.5)]):
        weights = [math.exp(x / temperature) for x in (1.0, 2.0, 0.5)]
        shares = [weight / sum(weights) for weight in weights]
        assert logprobs[index].item() == pytest.approx(math.log(shares[token]), rel=1e-5)
        assert entropy[index].item() == pytest.approx(-sum(s * math.log(s) for s in shares), rel=1e-5)
