"""Measures how a mixture's routers spread tokens over experts.

max_vio: of each layer, the most loaded expert's tokens over the mean's, minus 1 (MaxVio of Wang et al.,
"Auxiliary-Loss-Free Load Balancing", arXiv:2408.15664), over the step; its mean over the layers. 0 is balance.
routing_confidence: the share of the router's scores, over all experts, that goes to the experts it chose; mean over
tokens and layers. routing_entropy: the entropy, in nats, of the scores as shares of their sum; mean over tokens and
layers. It is log(experts) where all experts are alike to a router. Scores are the softmax of the router's logits, or
their sigmoids, whichever its weights are made of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from primerl.train.distributed.ranks import Ranks
from primerl.train.model.architectures import decoder

log = logging.getLogger(__name__)


class RoutingLoad:
    """Counts what the routers of a model choose while it records."""

    def __init__(self, model: Any) -> None:
        self._recording = False
        self._unknown = False
        found = routers(model)
        self._loads: list[Tensor | None] = [None] * len(found)
        self._shares: list[Tensor | None] = [None] * len(found)
        for index, (module, place) in enumerate(found):
            module.register_forward_hook(self._hook(index, place))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward pass only: what the backward pass recomputes is not counted again."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _hook(self, index: int, place: int) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        @torch.no_grad()
        def count(module: Any, _given: Any, output: Any) -> None:
            if not self._recording or self._unknown:
                return
            routed = _routed(output, place)
            if routed is None:
                self._unknown = True
                name = type(module).__name__
                log.warning("max_vio and routing_* are omitted: what %s answers is not understood", name)
                return
            logits, chosen, weights = routed
            load = logits.new_zeros(logits.shape[1], dtype=torch.float64)
            load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen, dtype=torch.float64).flatten())
            share, entropy = _shares(logits, chosen, weights)
            tokens = share.new_tensor(float(len(share)), dtype=torch.float64)
            sums = torch.stack([share.double().sum(), entropy.double().sum(), tokens])
            loads, shares = self._loads[index], self._shares[index]
            self._loads[index] = load if loads is None else loads + load
            self._shares[index] = sums if shares is None else shares + sums

        return count

    def take(self, ranks: Ranks) -> tuple[Tensor, Tensor] | None:
        """Loads [layers, experts] of all ranks since the last call, and sums of confidence, entropy and tokens
        [layers, 3]; None where the model has no routers, or some did not answer as they should."""
        if not self._loads:
            return None
        counted = torch.tensor([float(any(load is None for load in self._loads))], device=ranks.device)
        loads, shares = self._loads, self._shares
        self._loads, self._shares = [None] * len(loads), [None] * len(loads)
        # All ranks have to decide alike; one without micro-batches has counted nothing.
        if ranks.largest(counted).item():
            return None
        of_layers = torch.stack([load for load in loads if load is not None])
        return ranks.sum(of_layers), ranks.sum(torch.stack([sums for sums in shares if sums is not None]))

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Metrics of a step; empty if the model has no routers."""
        routed = self.take(ranks)
        return routing_metrics(*routed) if routed else {}


def routers(model: Any) -> list[tuple[torch.nn.Module, int]]:
    """The routers that transformers itself knows of, and where in what each answers its logits are."""
    known = (getattr(decoder(model), "_can_record_outputs", None) or {}).get("router_logits") or []
    kinds: list[tuple[type[torch.nn.Module], int]] = []
    for recorder in known if isinstance(known, list) else [known]:
        kind = getattr(recorder, "target_class", recorder)
        # A router that is found by name has a class that other modules have too.
        if isinstance(kind, type) and not getattr(recorder, "layer_name", None):
            kinds.append((kind, getattr(recorder, "index", 0)))
    return [(module, place) for module in model.modules() for kind, place in kinds if isinstance(module, kind)]


def _routed(output: Any, place: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits [T, E] in fp32, chosen experts [T, k] and their weights [T, k], told by shape and dtype, since each family
    has an order of its own; None where one of them is not there."""
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
    if len(parts) < 3 or place >= len(output) or not isinstance(output[place], Tensor):
        return None
    logits = output[place]
    if logits.dim() < 2 or not logits.is_floating_point():
        return None
    tokens = logits.numel() // logits.shape[-1]
    others = [part.reshape(tokens, -1) for part in parts if part is not logits and part.numel() % tokens == 0]
    whole = [part for part in others if part.dtype in (torch.int32, torch.int64)]
    if len(whole) != 1:
        return None
    weights = [part for part in others if part.is_floating_point() and part.shape == whole[0].shape]
    if len(weights) != 1 or whole[0].shape[1] > logits.shape[-1]:
        return None
    return logits.reshape(tokens, -1).float(), whole[0].long(), weights[0].float()


def _shares(logits: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence and entropy of each token, [T]. Weights may be scaled, or scaled to a sum of 1: their shares tell
    which scores they are made of."""
    shares = weights / weights.sum(1, keepdim=True)
    confidence, entropy, off = [], [], []
    for scores in (logits.softmax(-1), logits.sigmoid()):
        of_chosen, of_all = scores.gather(1, chosen), scores.sum(1, keepdim=True)
        confidence.append((of_chosen / of_all).sum(1))
        entropy.append(torch.special.entr(scores / of_all).sum(1))
        off.append((of_chosen / of_chosen.sum(1, keepdim=True) - shares).abs().sum())
    softmax = off[0] <= off[1]
    return torch.where(softmax, confidence[0], confidence[1]), torch.where(softmax, entropy[0], entropy[1])


def routing_metrics(loads: Tensor, shares: Tensor) -> dict[str, float]:
    """Metrics from sums over micro-batches and data ranks."""
    violation = loads.amax(1) / loads.mean(1).clamp(min=1e-9) - 1.0
    confidence, entropy, tokens = shares.sum(0).tolist()
    return {
        "max_vio/mean": violation.mean().item(),
        "routing_confidence/mean": confidence / max(tokens, 1.0),
        "routing_entropy/mean": entropy / max(tokens, 1.0),
    }
