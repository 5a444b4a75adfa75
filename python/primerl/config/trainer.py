"""The trainer of a run, and what supervised fine-tuning shares with it (`sft.py`)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from primerl.config.base import Fraction, Seconds, Section, Seed, Threads

Decay = Annotated[float, Field(ge=0, lt=1)]


def pair(given: Any) -> Any:
    """Of the command line, where the config library takes lists and no pairs."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(f"[{given.strip().removeprefix('[').removesuffix(']')}]")
    except ValueError:
        raise ValueError("expected two numbers, as in '[0.9, 0.95]'") from None


Decays = Annotated[tuple[Decay, Decay], BeforeValidator(pair)]


class Optimizer(Section):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) and its learning-rate schedule."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: Decays = (0.9, 0.95)
    """Decay rates of the first and second moment; on the command line `'[0.9, 0.95]'`."""
    eps: float = Field(default=1e-8, gt=0)
    """Term added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    schedule: Literal["constant", "linear"] = "constant"
    """`linear` falls to `final_lr_ratio` of the peak at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from zero."""
    final_lr_ratio: float = Field(default=0.1, ge=0)
    """Share of `lr` at which `linear` ends."""


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

    keep_last: int = Field(default=4, ge=2)
    """Newest versions that are kept; `primerl rl` raises it to max_async_level + 2 where it is left out."""
    keep_all: bool = False
    """Keep every version; `primerl verify` needs them."""


class Checkpoints(Section):
    """From what a run that was stopped goes on: `<output_dir>/checkpoints`."""

    interval: PositiveInt | None = None
    """Steps between checkpoints; without any, a run that was stopped trains again from step 1, on the same batches."""
    keep_last: PositiveInt = 1
    """Newest checkpoints that are kept."""
    keep_interval: PositiveInt | None = None
    """Checkpoints at multiples of this step are kept beside the newest."""


class TrainerLog(Section):
    """What is written to the trainer's log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""


class TrainerSettings(Section):
    """The trainer."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations."""
    threads: Threads = 0
    """CPU threads of torch; 0 leaves torch's own choice."""
    orchestrator_timeout_s: Seconds = 60.0
    """Give up when the orchestrator has not answered for this long."""
    batch_timeout_s: Seconds = 1800.0
    """Give up when the orchestrator answers, but one batch takes longer than this."""
    optim: Optimizer = Optimizer()
    loss: Loss = Loss()
    weights: Weights = Weights()
    ckpt: Checkpoints = Checkpoints()
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
    seed: Seed = 0
    """Seed of every random choice."""
    model: TrainedModel
