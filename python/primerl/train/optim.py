"""What updates the model: gradient clipping, the optimizer (`primerl.train.optimizers`), its schedule, and weights
kept in fp32 if the model computes in less.

The learning rate of step t = 1..N, with w steps of warm-up and f = `final_lr_ratio`:

    constant   lr * min(1, t / w)
    linear     that, times 1 - (1 - f) * t / N
    cosine     that, times f + (1 - f) * (1 + cos(pi * x)) / 2,  x = (t - w) / (N - w), at least 0      arXiv:1608.03983
    wsd        that, times 1 - (1 - f) * max(0, t - (N - d)) / d,  d = `decay_steps`                    arXiv:2404.06395

`wsd` (warm-up, stable, decay) decays over the last tenth of the steps unless `decay_steps` is set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from primerl.train import optimizers
from primerl.train.distributed.fsdp import local, whole
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.optimizers import NamedParameter
from primerl.train.settings import ConfigError, OptimConfig

log = logging.getLogger(__name__)

OUTSIDE_LAYERS = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "*embed_out*")
"""Names of embeddings and output layers, which Muon does not update."""

START = "start_values"
"""Attribute of a parameter in less than fp32: its unrounded fp32 values, on the CPU. The optimizer removes it."""


class Update(NamedTuple):
    """Result of a step."""

    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    zero_grad_ratio: float
    """Share of the gradient's values that are exactly 0."""


class Optimizer:
    """Updates parameters over steps 1..`max_steps`.

    Weights in less than fp32 have an fp32 copy here (from `START` if they have it), which is updated. Their gradients
    are summed in fp32: each backward pass adds to the copy's gradient and leaves none on the weight. A model that is
    divided among ranks is in fp32 itself; each rank updates its share.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        config: OptimConfig,
        max_steps: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.max_steps = max_steps
        self._ranks = ranks
        self._copies: list[tuple[Parameter, Parameter]] = []
        self.parameters: list[Parameter] = []
        """The updated tensors, which hold the gradients."""
        described = []
        for name, parameter in named:
            if not parameter.requires_grad:
                continue
            kept = self._in_fp32(parameter)
            self.parameters.append(kept)
            decay = weight_decay(name, parameter, config)
            described.append(NamedParameter(name, kept, decay, is_matrix(name, parameter)))
        if ranks.leads:
            _warn_of_long_schedules(config, max_steps)
        _check_patterns(config, [parameter.name for parameter in described])
        self._master: dict[int, Tensor] = {id(weight): copy for weight, copy in self._copies}
        self._optimizers = optimizers.build(described, config)

    def _in_fp32(self, parameter: Parameter) -> Parameter:
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        start = vars(parameter).pop(START, None)
        copy = Parameter(parameter.detach().float() if start is None else start.to(parameter.device))
        self._copies.append((parameter, copy))

        def add_up(weight: Tensor) -> None:
            gradient, weight.grad = weight.grad, None
            if gradient is not None:
                copy.grad = gradient.float() if copy.grad is None else copy.grad.add_(gradient)

        parameter.register_post_accumulate_grad_hook(add_up)  # type: ignore[no-untyped-call]
        return copy

    def state(self) -> dict[str, Tensor]:
        """The optimizers' state for a checkpoint, as `<parameter>.<key>`, the same for any number of ranks."""
        return {
            f"{name}.{key}": value
            for optimizer, name, parameter in self._named()
            for key, value in optimizer.state[parameter].items()
            if value is not None
        }

    def begin_state(self, saved: dict[str, torch.Size]) -> dict[str, Tensor]:
        """Allocate tensors for a saved state, to be filled; `saved` has their sizes.

        Raises ValueError if the state belongs to other parameters.
        """
        parameters = [(f"{name}.", optimizer, parameter) for optimizer, name, parameter in self._named()]
        kept: dict[str, list[str]] = {}
        for name in saved:
            owner, _, key = name.rpartition(".")
            kept.setdefault(f"{owner}.", []).append(key)
        for prefix, optimizer, parameter in parameters:
            for key in kept.get(prefix, []):
                size = saved[prefix + key]
                like = parameter.detach()
                # A tensor of the parameter's size is divided like it; others are counters.
                room = torch.zeros_like(like) if size == like.shape else torch.zeros(size, device=like.device)
                optimizer.state[parameter][key] = room
        return self.state()

    def use_copies(self) -> None:
        """Set weights to the values of their fp32 copies."""
        if self._copies:
            with torch.no_grad():
                weights, copies = zip(*self._copies, strict=True)
                torch._foreach_copy_(list(weights), list(copies))

    def master(self, weight: Tensor) -> Tensor:
        """The tensor that is updated for a weight of the model: itself, or its fp32 copy."""
        return self._master.get(id(weight), weight)

    def _named(self) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    yield optimizer, name, parameter

    def step(self, step: int) -> Update:
        """Clip, update, drop the gradients. Nothing is updated if the norm is not finite; the caller sees it."""
        zeros = self._zero_grad_ratio()
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_norm)).item()
        lr = learning_rate(self.config, step, self.max_steps)
        finite = norm == norm and norm != float("inf")
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Muon holds the parts of a stack of matrices, not the stack.
        for parameter in self.parameters:
            parameter.grad = None
        if finite:
            self.use_copies()
        return Update(norm, lr, zeros)

    @torch.no_grad()
    def _zero_grad_ratio(self) -> float:
        gradients = [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            return 1.0
        filled = torch.stack([gradient.count_nonzero() for gradient in gradients]).sum()
        total = sum(local(parameter).numel() for parameter in self.parameters)
        of_ranks = self._ranks.sum(torch.stack([filled, filled.new_tensor(total)]).double()).tolist()
        return 1.0 - float(of_ranks[0] / of_ranks[1])

    @torch.no_grad()
    def has_finite_parameters(self) -> bool:
        """Whether all parameters are finite, with one transfer from the device."""
        # The largest value of each, not the norm, which may overflow where every value is finite.
        held = [local(tensor) for tensor in (*self.parameters, *(weight for weight, _ in self._copies))]
        largest = torch._foreach_norm([tensor for tensor in held if tensor.numel()], float("inf"))
        infinite = torch.stack([value.float().isfinite() for value in largest]).logical_not().sum()
        return self._ranks.sum(infinite).item() == 0


def _constant(_config: OptimConfig, _step: int, _max_steps: int) -> float:
    return 1.0


def _linear(config: OptimConfig, step: int, max_steps: int) -> float:
    return 1.0 - (1.0 - config.final_lr_ratio) * step / max_steps


def _cosine(config: OptimConfig, step: int, max_steps: int) -> float:
    # A warm-up that fills the run leaves nothing to fall over.
    passed = max(0, step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    return config.final_lr_ratio + (1.0 - config.final_lr_ratio) * (1.0 + math.cos(math.pi * passed)) / 2.0


def _wsd(config: OptimConfig, step: int, max_steps: int) -> float:
    decay_steps = max(1, max_steps // 10) if config.decay_steps is None else config.decay_steps
    return 1.0 - (1.0 - config.final_lr_ratio) * max(0, step - (max_steps - decay_steps)) / decay_steps


SCHEDULES: dict[str, Callable[[OptimConfig, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Learning rate of step t = 1..N."""
    warm = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.lr * warm * SCHEDULES[config.schedule](config, step, max_steps)


def weight_decay(name: str, parameter: Tensor, config: OptimConfig) -> float:
    """Weight decay by the first pattern that matches the name; otherwise 0 for norms and biases, and `weight_decay` for
    the rest, embeddings included."""
    for pattern, decay in config.weight_decay_by_name.items():
        if fnmatchcase(name, pattern):
            return decay
    return 0.0 if _is_vector(name, parameter) else config.weight_decay


def is_matrix(name: str, parameter: Tensor) -> bool:
    """A matrix, or a stack of them, within a layer."""
    outside = any(fnmatchcase(name, pattern) for pattern in OUTSIDE_LAYERS)
    return not outside and not _is_vector(name, parameter)


def _is_vector(name: str, parameter: Tensor) -> bool:
    """A norm or a bias. The biases of a mixture's experts are stacked, and have two dimensions."""
    return parameter.dim() < 2 or name.endswith("bias")


def _warn_of_long_schedules(config: OptimConfig, max_steps: int) -> None:
    """Such settings may have been copied from a longer run."""
    if config.warmup_steps > max_steps:
        log.warning(
            "optim.warmup_steps is %d, and the run has %d steps: it ends before optim.lr is reached",
            config.warmup_steps,
            max_steps,
        )
    if config.schedule == "wsd" and config.decay_steps is not None and config.decay_steps > max_steps:
        log.warning(
            "optim.decay_steps is %d, and the run has %d steps: it begins with a lower learning rate than optim.lr",
            config.decay_steps,
            max_steps,
        )


def _check_patterns(config: OptimConfig, names: list[str]) -> None:
    for pattern in config.weight_decay_by_name:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError.at(
                "optim.weight_decay_by_name", f"no parameter's name matches {pattern!r}; names are like {names[0]!r}"
            )
