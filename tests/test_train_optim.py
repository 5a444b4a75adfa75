"""Schedules by their formulas; optimizers and clipping against torch's own parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from primerl.train.checkpoint.state import Checkpoints, TrainerState
from primerl.train.optim import Optimizer, learning_rate, weight_decay
from primerl.train.optimizers import NamedParameter, muon
from primerl.train.settings import ConfigError, OptimConfig
from settings_helpers import filled


def test_constant_schedule_with_and_without_warmup() -> None:
    assert [learning_rate(filled(OptimConfig, lr=0.5), step, 10) for step in (1, 5, 10)] == [0.5] * 3
    config = filled(OptimConfig, lr=0.5, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in (1, 2, 4, 9)] == [0.125, 0.25, 0.5, 0.5]


def test_linear_schedule_ends_at_its_share() -> None:
    config = filled(OptimConfig, lr=4e-3, schedule="linear", warmup_steps=20, final_lr_ratio=0.1)
    for step in (1, 10, 20, 300, 600):
        expected = 4e-3 * min(1, step / 20) * (1 - 0.9 * step / 600)
        assert learning_rate(config, step, 600) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(config, 600, 600) == pytest.approx(4e-4)


def test_step_clips_and_updates_like_adamw() -> None:
    config = filled(OptimConfig, lr=0.1, weight_decay=0.3, max_norm=0.5, betas=(0.8, 0.9))
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
    optimizer = Optimizer([("bias", parameter)], filled(OptimConfig, lr=0.1), 10)
    parameter.grad = torch.tensor([bad, 1.0])
    norm = optimizer.step(1).grad_norm
    assert not norm < float("inf")
    assert parameter.tolist() == [1.0, 2.0]


def test_one_value_that_is_not_finite_is_seen() -> None:
    # Finite, although their norm is not.
    large = torch.nn.Parameter(torch.full((4,), 3e38))
    other = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer([("large", large), ("other", other)], filled(OptimConfig), 10)
    assert optimizer.has_finite_parameters()
    for bad in (float("nan"), float("inf"), -float("inf")):
        with torch.no_grad():
            other[1, 0] = bad
        assert not optimizer.has_finite_parameters()


def test_cosine_falls_from_the_end_of_the_warm_up() -> None:
    config = filled(OptimConfig, lr=2.0, schedule="cosine", warmup_steps=10, final_lr_ratio=0.25)
    assert [learning_rate(config, step, 110) for step in (5, 10, 60, 110)] == pytest.approx([1.0, 2.0, 1.25, 0.5])
    assert learning_rate(config, 35, 110) == pytest.approx(2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi / 4)) / 2))


def test_warm_up_stable_decay() -> None:
    config = filled(OptimConfig, lr=2.0, schedule="wsd", warmup_steps=4, decay_steps=20, final_lr_ratio=0.0)
    rates = [learning_rate(config, step, 100) for step in (1, 4, 50, 80, 81, 90, 100)]
    assert rates == pytest.approx([0.5, 2.0, 2.0, 2.0, 1.9, 1.0, 0.0])
    tenth = filled(OptimConfig, lr=2.0, schedule="wsd", final_lr_ratio=0.0)
    assert [learning_rate(tenth, step, 100) for step in (90, 95, 100)] == pytest.approx([2.0, 1.0, 0.0])


NAMED = {
    "model.embed_tokens.weight": (12, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.mlp.experts.gate_up_proj": (3, 10, 8),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (3, 10),
    "model.norm.weight": (8,),
    "lm_head.weight": (12, 8),
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {}),
    ("muon", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {}),
    ("sign_sgd", {}),
]


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in NAMED.items()}


def give_gradients(named: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_weight_decay_by_name() -> None:
    named = parameters()
    config = filled(OptimConfig, weight_decay=0.1, weight_decay_by_name={"*embed*": 0.0, "*.q_proj.*": 0.3, "*": 0.1})
    default = {
        name: weight_decay(name, parameter, filled(OptimConfig, weight_decay=0.1)) for name, parameter in named.items()
    }
    assert [name for name, decay in default.items() if decay] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "lm_head.weight",
    ]
    own = {name: weight_decay(name, parameter, config) for name, parameter in named.items()}
    assert list(own.values()) == [0.0, 0.3, 0.3, 0.1, 0.1, 0.1, 0.1]
    with pytest.raises(ConfigError, match="no parameter's name matches '\\*wte\\*'"):
        Optimizer(named.items(), filled(OptimConfig, weight_decay_by_name={"*wte*": 0.0}), 10)


def test_weight_decay_reaches_the_optimizer() -> None:
    named = parameters()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = Optimizer(named.items(), filled(OptimConfig, lr=0.5, weight_decay=0.1), 10)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1)
    for name, parameter in named.items():
        decayed = parameter.dim() > 1 and not name.endswith("bias")
        assert torch.allclose(parameter, before[name] * (0.95 if decayed else 1.0)), name


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    """Against the two optimizers written out, each expert a matrix of its own."""
    ours, theirs = parameters(), parameters()
    config = filled(OptimConfig, type="muon", args={"momentum": 0.9}, lr=0.1, weight_decay=0.2, max_norm=1e9)
    optimizer = Optimizer(ours.items(), config, 10)
    experts = theirs["model.layers.0.mlp.experts.gate_up_proj"].detach()
    matrices = [theirs["model.layers.0.self_attn.q_proj.weight"], *(torch.nn.Parameter(e.clone()) for e in experts)]
    rest = [p for n, p in theirs.items() if n.split("mlp.")[-1] != "experts.gate_up_proj" and "q_proj.weight" not in n]
    assert len(rest) == 5
    muon = torch.optim.Muon(matrices, lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.shape == (12, 8)], "weight_decay": 0.2},
            {"params": [p for p in rest if p.shape != (12, 8)], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    for step in (1, 2, 3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        for matrix, gradient in zip(matrices[1:], theirs["model.layers.0.mlp.experts.gate_up_proj"].grad, strict=True):
            matrix.grad = gradient.clone()
        optimizer.step(step)
        muon.step()
        adamw.step()
    for name, parameter in ours.items():
        expected = theirs[name] if name.split("mlp.")[-1] != "experts.gate_up_proj" else torch.stack(matrices[1:])
        assert torch.allclose(parameter, expected, atol=1e-5), name
        assert parameter.grad is None


def test_sgd_is_torchs() -> None:
    ours, theirs = parameters(), parameters()
    config = filled(OptimConfig, type="sgd", args={"momentum": 0.9}, lr=0.1, max_norm=1e9)
    optimizer = Optimizer(ours.items(), config, 10)
    sgd = torch.optim.SGD(theirs.values(), lr=0.1, momentum=0.9)
    for step in (1, 2):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(step)
        sgd.step()
    assert all(torch.allclose(ours[name], theirs[name]) for name in NAMED)


def test_sign_sgd_moves_each_weight_by_the_learning_rate() -> None:
    ours, before = parameters(), parameters()
    config = filled(OptimConfig, type="sign_sgd", lr=0.1, weight_decay=0.2, max_norm=1e9)
    optimizer = Optimizer(ours.items(), config, 10)
    give_gradients(ours, 1)
    optimizer.step(1)
    give_gradients(before, 1)
    for name, parameter in before.items():
        assert parameter.grad is not None
        decay = 0.2 if parameter.dim() > 1 and not name.endswith("bias") else 0.0
        expected = parameter - 0.1 * (parameter.grad.sign() + decay * parameter)
        torch.testing.assert_close(ours[name].detach(), expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "args"), KINDS)
def test_going_on_from_a_checkpoint_is_exact(
    kind: str, args: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    config = filled(OptimConfig, type=kind, args=args, lr=0.1, weight_decay=0.1, schedule="cosine", warmup_steps=2)

    def make() -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
        named = {name: torch.nn.Parameter(parameter.detach().to(dtype)) for name, parameter in parameters().items()}
        return named, Optimizer(named.items(), config, 6)

    def train(optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            give_gradients(dict(zip(NAMED, optimizer.parameters, strict=True)), step)
            optimizer.step(step)

    whole, optimizer = make()
    train(optimizer, range(1, 4))
    checkpoints, state = Checkpoints(tmp_path, None), TrainerState(3, 0, 0, kind)
    checkpoints.save(state, Named(whole), optimizer)
    # Already while it is written.
    train(optimizer, range(4, 7))
    assert checkpoints.finish() == 3

    gone_on, optimizer = make()
    checkpoints.restore(state, Named(gone_on), optimizer)
    train(optimizer, range(4, 7))
    for name in NAMED:
        assert torch.equal(whole[name], gone_on[name]), name


class Named(torch.nn.Module):
    """Parameters under names that no module could give them."""

    def __init__(self, named: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self._named = named

    def state_dict(self, *, keep_vars: bool) -> dict[str, torch.nn.Parameter]:  # type: ignore[override]
        assert keep_vars
        return self._named


def test_share_of_zeros_in_the_gradient() -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), filled(OptimConfig), 10)
    give_gradients(named, 1)
    named["lm_head.weight"].grad = None
    gradient = named["model.norm.weight"].grad
    assert gradient is not None
    gradient[:3] = 0.0
    total = sum(parameter.numel() for parameter in named.values())
    assert optimizer.step(1).zero_grad_ratio == pytest.approx((96 + 3) / total)


def test_muon_on_divided_matrices_is_muon(tmp_path: Path) -> None:
    """The same gradients, whole and as a rank holds them: the same steps. Several ranks sum gradients in another order,
    and what Muon makes of that is no test of it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(12, 20, generator=generator)
        plain = torch.nn.Parameter(start.clone())
        divided = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        config = filled(OptimConfig, type="muon", lr=1e-2, weight_decay=0.1)

        def built(parameter: torch.nn.Parameter) -> list[torch.optim.Optimizer]:
            named = NamedParameter("w", parameter, config.weight_decay, matrix=True)
            return muon.build([named], config, muon.Options())

        optimizers = [built(plain), built(divided)]
        for _ in range(4):
            gradient = torch.randn(12, 20, generator=generator)
            plain.grad = gradient.clone()
            divided.grad = distribute_tensor(gradient.clone(), mesh, [Shard(0)])
            for (optimizer,) in optimizers:
                optimizer.step()
        moved = (plain.detach() - start).abs().max().item()
        torch.testing.assert_close(divided.detach().full_tensor(), plain.detach(), rtol=0, atol=1e-6 * moved)
    finally:
        dist.destroy_process_group()
