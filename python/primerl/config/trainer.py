"""Trainers: RL and supervised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from primerl.config.base import Fraction, Section


class Optimizer(Section):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Term added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    schedule: Literal["constant", "linear"] = "constant"
    """`linear` falls to a tenth of the peak at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from zero."""


class Loss(Section):
    """The policy-gradient loss: masked importance ratio and a penalty on its squared logarithm."""

    mask_low: Fraction = 0.2
    """A token with a negative advantage is left out when its probability fell by more than this."""
    mask_high: Fraction = 0.2
    """A token with a positive advantage is left out when its probability rose by more than this."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-ratio."""


class Weights(Section):
    """Which broadcast weights stay on disk."""

    keep_last: PositiveInt = 3
    """Newest versions that are kept."""
    keep_all: bool = False
    """Keep every version; `primerl verify` needs them."""


class TrainerLog(Section):
    """What is written to the trainer's log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""


class TrainerSettings(Section):
    """The trainer."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations."""
    threads: PositiveInt = 1
    """CPU threads of the model."""
    optim: Optimizer = Optimizer()
    loss: Loss = Loss()
    weights: Weights = Weights()
    log: TrainerLog = TrainerLog()


class TrainedModel(Section):
    """The model to train."""

    path: str
    """Model folder."""


class TrainerConfig(TrainerSettings):
    """One trainer process (`primerl trainer @ file`)."""

    output_dir: str
    """Folder of the run."""
    orchestrator_url: str
    """URL of the run's orchestrator."""
    max_steps: PositiveInt
    """The run ends after so many steps."""
    seed: NonNegativeInt = 0
    """Seed of every random choice."""
    model: TrainedModel
