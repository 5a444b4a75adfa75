"""Settings of the trainer: names and types of the keys in a resolved file. Those of supervised fine-tuning are in
`sft_settings`.

What a key means, its default and its bounds are in `primerl.config.schema.trainer`, by which the file was checked and
filled; a machine that only trains does not have that library. A test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from primerl.process.problems import ProblemError


class ConfigError(ProblemError, ValueError):
    """A setting does not go together with what there is: files, ranks, parts by their names. The message names it and
    what to do."""


ALL_LINEAR = "all-linear"
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]
    adapter_path: str | None


@dataclass(frozen=True, kw_only=True)
class TrainerLoraConfig(LoraConfig):
    broadcast: Literal["adapter", "merged"] | None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str
    trust_remote_code: bool
    lora: TrainerLoraConfig | None


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    type: str
    args: dict[str, Any]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    weight_decay_by_name: dict[str, float]
    max_norm: float
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    warmup_steps: int
    decay_steps: int | None
    final_lr_ratio: float


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    type: str
    args: dict[str, Any]
    custom: str | None
    rl_weight: float
    ce_weight: float
    ref_kl_weight: float
    ref_kl_max_ratio: float
    entropy_weight: float


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    keep_last: int
    keep_all: bool
    dtype: Dtype | None
    max_shard_bytes: int
    transport: Literal["files", "collective"]
    probe: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointWeightsConfig:
    only_last: bool
    save_adapter_separately: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval: int | None
    keep_last: int
    keep_interval: int | None
    weights_only: bool
    resume_step: int | None
    weights: CheckpointWeightsConfig

    @property
    def goes_back_to(self) -> int | None:
        """The step that is named; None for the newest."""
        return None if self.resume_step == -1 else self.resume_step


NO_CHECKPOINTS = CheckpointConfig(
    interval=None,
    keep_last=1,
    keep_interval=None,
    weights_only=False,
    resume_step=None,
    weights=CheckpointWeightsConfig(only_last=False, save_adapter_separately=False),
)
"""What a trainer without `ckpt` does: saves a model folder at the end."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    level: Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class ComputationConfig:
    dtype: Dtype | None
    activation_checkpointing: Literal["none", "full", "selective"]
    compile: bool
    shared_prefixes: Literal["auto", "off"]
    threads: int
    ranks: int
    dp_replicate: int
    context_parallel: int
    dist_timeout_s: float
    peak_tflops: float | None


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(ComputationConfig):
    """Settings of `primerl trainer`."""

    output_dir: str
    orchestrator_url: str
    max_steps: int
    model: ModelConfig
    seed: int
    environments: list[str]
    distributions_interval: int | None
    stored_adapters_interval: int | None
    gpu_share: float | None
    orchestrator_timeout_s: float
    batch_timeout_s: float
    optim: OptimConfig
    enable_router_replay: bool
    loss: LossConfig
    weights: WeightsConfig
    ckpt: CheckpointConfig | None
    log: LogConfig
    metrics_port: int | None
