"""How a mixture's router spreads tokens is measured of every family whose routers are understood."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import LENGTHS, MIXTURES, NOT_UNDERSTOOD, packed_loss
from primerl.train.distributed.ranks import ALONE
from primerl.train.model.layers import prepare
from primerl.train.model.packed_model import load_model
from primerl.train.model.routing import RoutingLoad, routers, routing_metrics
from torch import Tensor

SIGMOIDS = {
    *("afmoe", "axk1", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3"),
    *("mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "solar_open", "laguna"),
    *("kimi_linear", "lfm2_moe", "nemotron_h"),
}
"""Families whose routers weigh experts by sigmoids, the others by a softmax; as their code in transformers has it."""


@pytest.mark.parametrize("family", sorted(set(MIXTURES) - NOT_UNDERSTOOD))
def test_routing_is_measured(family: str, folders: Any) -> None:
    model = load_model(folders(family))
    load = RoutingLoad(model)
    prepare(model, "full", compile_layers=False)
    answered: list[tuple[Tensor, ...]] = []
    for module, _ in routers(model):
        module.register_forward_hook(lambda _module, _given, output: answered.append(output))
    with load.recording():
        loss = packed_loss(model)
    confidences, entropies = zip(*(measured(family, answer) for answer in answered), strict=True)
    loss.backward()  # computes the layers again, unrecorded
    counted = load.take(ALONE)
    assert counted is not None
    loads, sums = counted
    layers, tokens = len(confidences), sum(LENGTHS)
    assert loads.shape[0] == layers >= 1
    assert loads.sum(1).tolist() == [2.0 * tokens] * layers
    assert sums[:, 2].tolist() == [float(tokens)] * layers
    metrics = routing_metrics(loads, sums)
    most = [max(row) / (sum(row) / len(row)) - 1 for row in loads.tolist()]
    assert metrics["max_vio/mean"] == pytest.approx(sum(most) / layers)
    assert metrics["routing_confidence/mean"] == pytest.approx(sum(confidences) / layers, abs=1e-5)
    assert metrics["routing_entropy/mean"] == pytest.approx(sum(entropies) / layers, abs=1e-5)
    assert 0.0 < metrics["routing_entropy/mean"] < math.log(loads.shape[1])
    assert 0.5 < metrics["routing_confidence/mean"] < 1.0
    assert load.take(ALONE) is None


def measured(family: str, answer: tuple[Tensor, ...]) -> tuple[float, float]:
    """Share of the router's scores that goes to the chosen experts, and entropy of the scores, mean over tokens; by
    what its family does."""
    (chosen,) = (part for part in answer if part.dtype == torch.int64)
    logits = max((part for part in answer if part.is_floating_point()), key=lambda part: part.shape[-1])
    scores = logits.float().sigmoid() if family in SIGMOIDS else logits.float().softmax(-1)
    entropy = torch.distributions.Categorical(probs=scores).entropy().mean().item()
    return (scores.gather(1, chosen).sum(1) / scores.sum(1)).mean().item(), entropy


@pytest.mark.parametrize("family", sorted(NOT_UNDERSTOOD & {"jetmoe", "llama4_text"}))
def test_a_router_that_is_not_understood_is_left_out_and_named_once(
    family: str, folders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(folders(family))
    load = RoutingLoad(model)
    for _ in range(2):
        with load.recording():
            packed_loss(model)
        assert load.metrics(ALONE) == {}
    (said,) = [record.getMessage() for record in caplog.records if "max_vio" in record.getMessage()]
    assert said.startswith("max_vio and routing_* are omitted: what ")


def test_a_dense_model_has_no_routing(folders: Any) -> None:
    assert RoutingLoad(load_model(folders("qwen3"))).take(ALONE) is None
