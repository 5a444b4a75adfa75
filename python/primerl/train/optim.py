"""AdamW, learning-rate schedules and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter

from primerl.train.config import OptimConfig


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) over all parameters, with a schedule over steps 1..`max_steps`."""

    def __init__(self, parameters: Iterable[Parameter], config: OptimConfig, max_steps: int) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.config = config
        self.max_steps = max_steps
        self._adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._adamw.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state)

    def step(self, step: int) -> tuple[float, float]:
        """Clip, update, forget the gradients. Returns the gradient's norm before clipping, and the learning rate.

        Nothing is updated when the norm is not finite: the caller sees it in the answer.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_norm).item()
        lr = learning_rate(self.config, step, self.max_steps)
        if norm == norm and norm != float("inf"):
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm, lr

    @torch.no_grad()
    def has_finite_parameters(self) -> bool:
        """One answer from the device for all of them: any value that is not finite makes the sum not finite."""
        # The largest value of each, not the norm, which may overflow where every value is finite.
        largest = torch._foreach_norm([*self.parameters], float("inf"))
        return bool(torch.stack([value.isfinite() for value in largest]).all())


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Learning rate of step t = 1..N.

    constant: lr * min(1, t / warmup);  linear: that times (1 - (1 - final_lr_ratio) * t / N).
    """
    lr = config.lr * min(1.0, step / config.warmup_steps) if config.warmup_steps else config.lr
    if config.schedule == "linear":
        lr *= 1.0 - (1.0 - config.final_lr_ratio) * step / max_steps
    return lr
