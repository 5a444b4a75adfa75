"""The learning rate of each step. With t = 1..N the step, w the steps of warm-up, f = `final_lr_ratio`:

constant   lr * min(1, t / w)
linear     that times 1 - (1 - f) * t / N
cosine     that times f + (1 - f) * (1 + cos(pi * x)) / 2,  x = (t - w) / (N - w), 0 before          (arXiv:1608.03983)
wsd        that times 1 - (1 - f) * max(0, t - (N - d)) / d,  d = `decay_steps`     (warm-up, stable, decay:
           arXiv:2404.06395, which decays over the last tenth, as is done where `decay_steps` is left out)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from primerl.train.config import OptimConfig


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
