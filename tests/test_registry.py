"""Policy losses and optimizers from outside the package: by path, and as entry points of an installed distribution."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from primerl.train import losses, optimizers
from primerl.train.losses import Tokens
from primerl.train.objective.components import load_policy_loss
from primerl.train.optim import Optimizer
from primerl.train.registry import Registry
from primerl.train.settings import ConfigError, LossConfig, OptimConfig
from settings_helpers import filled
from test_train_loss import LOSSES

LOSS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    delta: float = 1.0

    def check(self):
        if not self.delta > 0:
            raise ValueError(f"delta is {self.delta}; it must be above 0")
        if self.delta > 100:
            raise ValueError("delta: must be at most 100")

def policy_loss(tokens, options):
    return -tokens.advantages * tokens.logprobs * options.delta
"""
OPTIMIZER = """
import torch
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    scale: float = 1.0

def build(parameters, config, options):
    tensors = [("whole." + one.name, one.tensor) for one in parameters]
    return [torch.optim.SGD(tensors, lr=config.lr, weight_decay=options.scale)]
"""


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a package of losses and a module of an optimizer."""
    package = tmp_path / "outside_losses"
    package.mkdir()
    (package / "__init__.py").write_text("class Empty: ...\n")
    (package / "huber.py").write_text(LOSS)
    (package / "broken.py").write_text("raise RuntimeError('no')\n")
    (tmp_path / "outside_lion.py").write_text(OPTIMIZER)
    facts = tmp_path / "outside-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[primerl.losses]\nhuber = outside_losses.huber\nhuber_function = outside_losses.huber:policy_loss\n"
        "broken = outside_losses.broken\n\n[primerl.optimizers]\nlion = outside_lion\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("outside_")]:
        monkeypatch.delitem(sys.modules, name)


def trained(optim: OptimConfig, loss: LossConfig) -> torch.Tensor:
    """A parameter after one step."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Optimizer([("weight", weight)], optim, max_steps=1)
    zeros = torch.zeros(3)
    tokens = Tokens(
        logprobs=torch.log_softmax(weight, 0),
        engine_logprobs=zeros,
        advantages=torch.tensor([1.0, 0.0, 0.0]),
        sequences=zeros.long(),
        sequence_count=1,
        staleness=zeros.long(),
    )
    answer = load_policy_loss(loss)(tokens)
    found = answer if isinstance(answer, torch.Tensor) else answer.loss
    found.sum().backward()
    optimizer.step(1)
    return weight.detach()


@pytest.mark.parametrize(
    "kind", ["huber", "huber_function", "outside_losses:huber", "outside_losses.huber:policy_loss"]
)
def test_a_loss_from_outside_trains(kind: str) -> None:
    optim = filled(OptimConfig, lr=0.1, type="sgd", max_norm=100.0)
    once = trained(optim, filled(LossConfig, type=kind))
    twice = trained(optim, filled(LossConfig, type=kind, args={"delta": 2.0}))
    assert once[0] > 1.0
    assert torch.allclose(twice - 1.0, 2.0 * (once - 1.0))
    for value, said in ((0.0, r" is 0\.0; it must be above 0"), (101.0, ": must be at most 100")):
        with pytest.raises(ConfigError, match=rf"^loss\.args\.delta{said}$") as caught:
            losses.REGISTRY.options(kind, {"delta": value}, "loss.")
        assert caught.value.keys == ("loss.args.delta",)
    with pytest.raises(ConfigError, match=r"^unknown setting `loss\.args\.gamma`; known here: delta$"):
        losses.REGISTRY.options(kind, {"gamma": 0.0}, "loss.")


@pytest.mark.parametrize("kind", ["lion", "outside_lion:build"])
def test_an_optimizer_from_outside_trains(kind: str) -> None:
    config = filled(OptimConfig, lr=0.1, type=kind, args={"scale": 0.5})
    changed = trained(config, filled(LossConfig, type="importance"))
    assert not torch.equal(changed, torch.ones(3))
    with pytest.raises(ConfigError, match=r"^optim\.args\.scale is inf; it must be finite$"):
        optimizers.REGISTRY.options(kind, {"scale": float("inf")}, "optim.")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "hubre",
            rf"type is 'hubre'; it must be one of {LOSSES}, 'broken', 'huber', 'huber_function'$",
        ),
        ("broken", r"type is 'broken': RuntimeError: no$"),
        ("no_such:thing", r"type is 'no_such:thing': ModuleNotFoundError: No module named 'no_such'$"),
        (
            "outside_losses:gone",
            r"type is 'outside_losses:gone': ModuleNotFoundError: No module named 'outside_losses.gone'",
        ),
        ("outside_losses:Empty", r"Empty', but Empty has not both a dataclass `Options` and a function "),
        ("outside_lion:Options", r"Options', but .* has not both a dataclass `Options` and a function `policy_loss`"),
    ],
)
def test_what_is_wrong_is_named(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        losses.REGISTRY.find(kind, "loss.")
    assert str(caught.value).startswith("loss.type is ")


@pytest.mark.parametrize(("registry", "folder"), [(losses.REGISTRY, "losses"), (optimizers.REGISTRY, "optimizers")])
def test_names_are_those_of_the_files(registry: Registry, folder: str, repository: Path) -> None:
    files = (repository / "python" / "primerl" / "train" / folder).glob("[!_]*.py")
    assert registry.built_in() == sorted(file.stem for file in files)
    page = (repository / "docs" / "configuration.md").read_text()
    assert all(f"`{name}`" in page for name in registry.built_in())


@pytest.mark.parametrize("registry", [losses.REGISTRY, optimizers.REGISTRY])
def test_each_file_has_what_the_protocol_asks_for(registry: Registry) -> None:
    assert all(registry.options(name, {}, "") is not None for name in registry.built_in())
