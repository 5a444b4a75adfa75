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
    """Replaces what `topk` chooses of `experts` scores for each of T tokens, by `wanted` [T, k] where that is known."""

    def __init__(self, tokens: int, experts: int, wanted: Tensor | None = None) -> None:
        super().__init__()
        self._shape = (tokens, experts)
        self._wanted = wanted
        self.calls = 0
        self.own: Tensor | None = None  # [T, k]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in _CHOOSING:
            return answer
        scores = args[0] if args else (kwargs or {})["input"]
        # Groups of experts are chosen by the same function, from scores of other shapes.
        if scores.shape[-2:] != self._shape or scores.numel() != self._shape[0] * self._shape[1]:
            return answer
        # With one token, scores of a single group of experts have this shape too; experts are chosen last.
        self.calls = 1 if self._shape[0] == 1 else self.calls + 1
        self.own = answer.indices.reshape(self._shape[0], -1)
        return answer if self._wanted is None else self._replaced(scores, answer.indices, self.own)

    def _replaced(self, scores: Tensor, indices: Tensor, own: Tensor) -> Any:
        assert self._wanted is not None
        if own.shape != self._wanted.shape:
            raise ModelError(
                f"the engine chose {self._wanted.shape[1]} experts for a token, and this model's router chooses "
                f"{own.shape[1]}: they do not have the same model"
            )
        chosen = torch.where(self._wanted >= 0, self._wanted, own).reshape(indices.shape)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class _Routers:
    """The routers of a model, one a layer, whose choices can be seen and replaced."""

    def __init__(self, model: Any) -> None:
        """Raises ModelError: the model has no such routers."""
        found = routers(model)
        if not found:
            raise ModelError(
                f"enable_router_replay: {type(model).__name__} has no routers that transformers names, so there is "
                "nothing to replay; omit it"
            )
        names = {id(module): name for name, module in model.named_modules()}
        self.layers = [_layer(names[id(module)]) for module, _ in found]
        if len(set(self.layers)) < len(self.layers):
            raise ModelError(
                f"enable_router_replay: {type(model).__name__} has several routers in a layer, of which engines report "
                "only one; omit it"
            )
        self.decoder_layers = int(model.config.get_text_config().num_hidden_layers)
        self.experts = [_experts(module) for module, _ in found]
        for index, (module, _) in enumerate(found):
            module.forward = self._watched(module.forward, index, type(module).__name__)

    def _is_watching(self) -> bool:
        raise NotImplementedError

    def _wanted(self, index: int) -> Tensor | None:
        """What router `index` is to choose: [T, k] int64; None leaves it to itself."""
        raise NotImplementedError

    def _note(self, index: int, wanted: Tensor | None, own: Tensor) -> None:
        """The router would have chosen `own` [T, k]."""
        raise NotImplementedError

    def _watched(self, forward: Any, index: int, name: str) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def choose(hidden_states: Tensor, *given: Any, **named: Any) -> Any:
            if not self._is_watching():
                return forward(hidden_states, *given, **named)
            wanted = self._wanted(index)
            mode = _Choosing(hidden_states.shape[:-1].numel(), self.experts[index], wanted)
            with mode:
                answer = forward(hidden_states, *given, **named)
            if mode.own is None or mode.calls != 1:
                raise ModelError(
                    f"enable_router_replay: {name} does not choose experts by one call of topk, so it cannot be given "
                    "the engine's choice; omit it"
                )
            self._note(index, wanted, mode.own)
            return answer

        return choose


class ChosenExperts(_Routers):
    """Notes what the routers of an engine's model choose."""

    def __init__(self, model: Any) -> None:
        """Raises ModelError: the model has no such routers."""
        super().__init__(model)
        self._chosen: dict[int, Tensor] = {}

    def take(self) -> Tensor:
        """[T, layers of the decoder, k] int64 of the last forward pass; 0 for layers that are dense."""
        chosen, self._chosen = self._chosen, {}
        first = next(iter(chosen.values()))
        every = first.new_zeros(len(first), self.decoder_layers, first.shape[1])
        for index, own in chosen.items():
            every[:, self.layers[index]] = own
        return every

    def _is_watching(self) -> bool:
        return True

    def _wanted(self, index: int) -> Tensor | None:
        return None

    def _note(self, index: int, wanted: Tensor | None, own: Tensor) -> None:
        self._chosen[index] = own


class RouterReplay(_Routers):
    """The routers of a trainer's model, which choose what the engine chose while `replaying`."""

    def __init__(self, model: Any) -> None:
        """Raises ModelError: the model has no such routers."""
        super().__init__(model)
        self._given: Tensor | None = None  # [T, routers, k]
        self._counted: set[int] = set()
        self._tokens = [0, 0]  # known, and all
        self._choices = [torch.zeros(2, dtype=torch.float64)]  # others than the router's own, and all

    @contextmanager
    def replaying(self, experts: RoutedExperts | None, tokens: int, device: torch.device | str) -> Iterator[None]:
        """Around the forward pass of `tokens` tokens, and its backward pass, which may compute layers again.

        Raises ModelError: the experts are not of this model.
        """
        self._tokens[1] += tokens
        if experts is not None:
            # Looked at on the CPU: a GPU need not be waited for.
            given = self._of_routers(experts.of_all(tokens, "cpu"))
            self._check(given)
            self._tokens[0] += len(experts.values)
            self._given, self._counted = given.to(device), set()
        try:
            yield
        finally:
            self._given = None

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Metrics over all ranks since the last call."""
        choices = torch.stack([one.to(ranks.device) for one in self._choices]).sum(0)
        sums = torch.cat([torch.tensor(self._tokens, dtype=torch.float64, device=ranks.device), choices])
        known, tokens, other, chosen = ranks.sum(sums).tolist()
        self._tokens, self._choices = [0, 0], [torch.zeros(2, dtype=torch.float64)]
        return {
            "router_replay/known": known / max(tokens, 1.0),
            "router_replay/changed": other / max(chosen, 1.0),
        }

    def _of_routers(self, given: Tensor) -> Tensor:
        """[T, routers, k] of [T, layers, k]. vLLM reports a row for each layer of the decoder, dense ones included."""
        layers = given.shape[1]
        if layers == self.decoder_layers and max(self.layers) < layers:
            return given[:, self.layers]
        if layers == len(self.layers):
            return given
        raise ModelError(
            f"the engine reported experts of {layers} layers, and this model has {self.decoder_layers} layers, "
            f"{len(self.layers)} of them mixtures: they do not have the same model"
        )

    def _is_watching(self) -> bool:
        return self._given is not None

    def _check(self, given: Tensor) -> None:
        for highest, experts in zip(given.amax((0, 2)).tolist(), self.experts, strict=True):
            if highest >= experts:
                raise ModelError(
                    f"the engine chose expert {highest}, and this model has {experts}: they do not have the same model"
                )

    def _wanted(self, index: int) -> Tensor | None:
        assert self._given is not None
        return self._given[:, index].long()

    @torch.no_grad()
    def _note(self, index: int, wanted: Tensor | None, own: Tensor) -> None:
        """What the backward pass computes again is not counted again."""
        if index in self._counted or wanted is None:
            return
        self._counted.add(index)
        known = wanted >= 0
        other = known & (wanted.unsqueeze(2) != own.unsqueeze(1)).all(2)
        self._choices.append(torch.stack([other.sum(), known.sum()]).double())


def _experts(router: torch.nn.Module) -> int:
    """Rows of its matrix: one score each."""
    return next((one.shape[0] for one in router.parameters() if one.dim() == 2), 0)


def _layer(name: str) -> int:
    """The layer's number in a module's name, such as `model.layers.3.mlp.gate`."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    if found is None:
        raise ModelError(f"enable_router_replay: it is not known of which layer {name} is; omit it")
    return int(found.group(1))
