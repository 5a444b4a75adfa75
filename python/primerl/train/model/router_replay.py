"""Router replay: tokens go to the experts that the engine chose for them (R3, "Rollout Routing Replay",
arXiv:2510.11370).

A router's small rounding differences choose other experts, and with them other probabilities: an engine in bf16 and a
trainer in fp32 disagree on tokens whose best experts are close to each other. With replay the engine's choice counts.
How much each of these experts counts is still computed by the trainer's own router, by the family's own rule, and
gradients reach the router through these weights.

Each family computes its weights in another way from what it has chosen, but all choose by `torch.topk` over one score
for each expert. So it is the answer of that call that is replaced: the indices by the engine's, the values by the
scores at them. What comes after it is the family's own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from primerl.train.data.experts import RoutedExperts
from primerl.train.distributed.ranks import Ranks
from primerl.train.model.packed import ModelError
from primerl.train.model.routing import routers

_CHOOSING = (torch.topk, Tensor.topk)


class _Choosing(TorchFunctionMode):
    """Replaces what `topk` chooses among `experts` scores for each of T tokens. `experts` 0: replaces nothing."""

    def __init__(self, wanted: Tensor, experts: int) -> None:
        super().__init__()
        self._wanted = wanted  # [T, k]
        self._experts = experts
        self.replaced = 0
        self.own: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in _CHOOSING:
            return answer
        scores = args[0] if args else (kwargs or {})["input"]
        tokens, chosen = self._wanted.shape
        # Groups of experts are chosen by the same function, from scores of other shapes.
        if scores.dim() < 2 or scores.shape[-2:] != (tokens, self._experts) or scores.numel() != tokens * self._experts:
            return answer
        if answer.indices.shape[-1] != chosen:
            raise ModelError(
                f"the engine chose {chosen} experts for a token, and this model's router chooses "
                f"{answer.indices.shape[-1]}: they do not have the same model"
            )
        self.own = answer.indices.reshape(tokens, chosen)
        indices = torch.where(self._wanted >= 0, self._wanted, self.own).reshape(answer.indices.shape)
        self.replaced += 1
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class RouterReplay:
    """The routers of a model, that choose what the engine chose while `replaying`."""

    def __init__(self, model: Any) -> None:
        """Raises ModelError: the model has no routers that can be directed."""
        found = routers(model)
        if not found:
            raise ModelError(
                f"enable_router_replay: {type(model).__name__} has no routers that transformers names, so there is "
                "nothing to replay; omit it"
            )
        names = {id(module): name for name, module in model.named_modules()}
        self._layers = [_layer(names[id(module)]) for module, _ in found]
        if len(set(self._layers)) < len(self._layers):
            raise ModelError(
                f"enable_router_replay: {type(model).__name__} has several routers in a layer, of which engines report "
                "only one; omit it"
            )
        self._decoder_layers = int(model.config.get_text_config().num_hidden_layers)
        self._experts = [0] * len(found)
        self._given: Tensor | None = None  # [T, routers, k]
        self._counted: set[int] = set()
        self._sums = torch.zeros(4, dtype=torch.float64)
        for index, (module, place) in enumerate(found):
            module.forward = self._directed(module.forward, index, place, type(module).__name__)

    @contextmanager
    def replaying(self, experts: RoutedExperts | None, tokens: int, device: torch.device | str) -> Iterator[None]:
        """Around the forward pass of `tokens` tokens, and its backward pass, which may compute layers again.

        Raises ModelError: the experts are not of this model.
        """
        if experts is not None:
            self._given = self._of_routers(experts.of_all(tokens, device))
            self._counted = set()
        try:
            yield
        finally:
            self._given = None

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Metrics over all ranks since the last call."""
        known, tokens, other, chosen = ranks.sum(self._sums.to(ranks.device)).tolist()
        self._sums = torch.zeros(4, dtype=torch.float64)
        return {
            "router_replay/known": known / max(tokens, 1.0),
            "router_replay/changed": other / max(chosen, 1.0),
        }

    def _of_routers(self, given: Tensor) -> Tensor:
        """[T, routers, k] of [T, layers, k]. vLLM reports a row for each layer of the decoder, dense ones included."""
        layers = given.shape[1]
        if layers == self._decoder_layers and max(self._layers) < layers:
            return given[:, self._layers]
        if layers == len(self._layers):
            return given
        raise ModelError(
            f"the engine reported experts of {layers} layers, and this model has {self._decoder_layers} layers, "
            f"{len(self._layers)} of them mixtures: they do not have the same model"
        )

    def _directed(self, forward: Any, index: int, place: int, name: str) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def choose(*args: Any, **kwargs: Any) -> Any:
            if self._given is None:
                return forward(*args, **kwargs)
            if not self._experts[index]:
                with torch.no_grad():
                    self._experts[index] = int(forward(*args, **kwargs)[place].shape[-1])
            wanted, experts = self._given[:, index].long(), self._experts[index]
            highest = int(wanted.max())
            if highest >= experts:
                raise ModelError(
                    f"the engine chose expert {highest}, and this model has {experts}: they do not have the same model"
                )
            mode = _Choosing(wanted, experts)
            with mode:
                answer = forward(*args, **kwargs)
            if mode.own is None or mode.replaced != 1:
                raise ModelError(
                    f"enable_router_replay: {name} does not choose experts by one call of topk, so it cannot be given "
                    "the engine's choice; omit it"
                )
            self._count(index, wanted, mode.own)
            return answer

        return choose

    @torch.no_grad()
    def _count(self, index: int, wanted: Tensor, own: Tensor) -> None:
        """What the backward pass computes again is not counted again."""
        if index in self._counted:
            return
        self._counted.add(index)
        known = wanted[:, 0] >= 0
        chosen = int(known.sum()) * wanted.shape[1]
        same = int((wanted.unsqueeze(2) == own.unsqueeze(1)).any(2)[known].sum())
        self._sums += torch.tensor([known.sum().item(), known.numel(), chosen - same, chosen], dtype=torch.float64)


def _layer(name: str) -> int:
    """The layer's number in a module's name, such as `model.layers.3.mlp.gate`."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    if found is None:
        raise ModelError(f"enable_router_replay: it is not known of which layer {name} is; omit it")
    return int(found.group(1))
