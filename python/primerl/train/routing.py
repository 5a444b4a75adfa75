"""How a mixture's router spreads tokens over experts.

max_vio: of each layer, the most loaded expert's tokens over the mean's, minus 1 (MaxVio of Wang et al.,
"Auxiliary-Loss-Free Load Balancing", arXiv:2408.15664), over the step; its mean over the layers. 0 is balance.
routing_confidence: the share of the router's softmax that goes to the experts it chose, mean over tokens and layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from primerl.train.distributed import Ranks


class RoutingLoad:
    """Counts what the routers of a model choose while it records; it has none where the model has none."""

    def __init__(self, model: Any) -> None:
        self._recording = False
        recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
        router = getattr(recorded.get("router_logits"), "target_class", None)
        found = [module for module in model.modules() if router is not None and isinstance(module, router)]
        self._loads: list[Tensor | None] = [None] * len(found)
        self._confidence: list[Tensor | None] = [None] * len(found)
        for index, module in enumerate(found):
            module.register_forward_hook(self._hook(index))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """For the forward pass: what the backward pass computes again is not counted twice."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _hook(self, index: int) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        @torch.no_grad()
        def count(_module: Any, _given: Any, output: Any) -> None:
            # (logits, weights, indices) is how transformers' routers answer; of others nothing is known.
            if not (self._recording and isinstance(output, tuple) and len(output) == 3):
                return
            logits, _, chosen = output
            logits = logits.reshape(-1, logits.shape[-1]).float()
            chosen = chosen.reshape(logits.shape[0], -1)
            load = logits.new_zeros(logits.shape[1], dtype=torch.float64)
            load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen, dtype=torch.float64).flatten())
            share = logits.softmax(-1).gather(1, chosen).double().sum()
            sums = torch.stack([share, share.new_tensor(float(logits.shape[0]))])
            loads, confidence = self._loads[index], self._confidence[index]
            self._loads[index] = load if loads is None else loads + load
            self._confidence[index] = sums if confidence is None else confidence + sums

        return count

    def take(self, ranks: Ranks) -> tuple[Tensor, Tensor] | None:
        """Loads [layers, experts] and confidence [layers, 2] of all ranks since the last call; None where the model
        has no routers, or some did not answer as they should."""
        if not self._loads:
            return None
        counted = torch.tensor([float(any(load is None for load in self._loads))], device=ranks.device)
        loads, confidence = self._loads, self._confidence
        self._loads, self._confidence = [None] * len(loads), [None] * len(loads)
        # All ranks have to come to the same decision. One without micro-batches has counted nothing.
        if ranks.largest(counted).item():
            return None
        of_layers = torch.stack([load for load in loads if load is not None])
        return ranks.sum(of_layers), ranks.sum(torch.stack([sums for sums in confidence if sums is not None]))

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Of a step; none where the model has no routers."""
        routed = self.take(ranks)
        return routing_metrics(*routed) if routed else {}


def routing_metrics(loads: Tensor, confidence: Tensor) -> dict[str, float]:
    """Of sums over micro-batches and data ranks."""
    violation = loads.amax(1) / loads.mean(1).clamp(min=1e-9) - 1.0
    share, tokens = confidence.sum(0).tolist()
    return {"max_vio/mean": violation.mean().item(), "routing_confidence/mean": share / max(tokens, 1.0)}
