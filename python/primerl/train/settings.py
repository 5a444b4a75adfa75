"""Settings of the trainer: plain dataclasses read from a mapping (a parsed TOML file). Those of supervised fine-tuning
are in `sft_config`.

This package cannot use the config library of the command line, which reads the same keys; a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from primerl.train.reader import ConfigError, read

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, which is trained in place of the model's own weights; see `primerl.train.adapters.lora`."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = 0.0
    """Of the adapter's inputs."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Ends of dotted names of linear layers, or `all-linear`."""
    adapter_path: str | None = None
    """Folder of an adapter to begin with."""


@dataclass(frozen=True, kw_only=True)
class TrainerLoraConfig(LoraConfig):
    broadcast: Literal["adapter", "merged"] | None = None
    """What engines are sent; merged weights where it is left out."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy to train."""

    path: str
    """Folder of a Hugging Face checkpoint with tokenizer and chat template."""
    lora: TrainerLoraConfig | None = None


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning-rate schedule and gradient clipping."""

    type: str = "adamw"
    """A module of `primerl.train.optimizers`."""
    args: dict[str, Any] = field(default_factory=dict)
    """That module's `Options`."""
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW, also where Muon leaves parameters to it."""
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Not of norms and biases."""
    weight_decay_by_name: dict[str, float] = field(default_factory=dict)
    """Pattern (`*` and `?`) of parameter names -> weight decay; the first that matches counts."""
    max_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """See `primerl.train.optim`."""
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Last steps, over which `wsd` decays; a tenth of them where it is left out."""
    final_lr_ratio: float = 0.1
    """Share of `lr` that a schedule ends at."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss; see `primerl.train.loss.components` for its components."""

    type: str = "dppo"
    """A module of `primerl.train.losses`."""
    args: dict[str, Any] = field(default_factory=dict)
    """That module's `Options`, or the keyword arguments of `custom`."""
    custom: str | None = None
    """`module:function` in place of `type`; see docs/custom-losses.md."""
    rl_weight: float = 1.0
    ce_weight: float = 0.0
    ref_kl_weight: float = 0.0
    ref_kl_max_ratio: float = 2.0
    """Ratios of trainer to engine above this count as this one in `ref_kl`."""
    entropy_weight: float = 0.0
    """Of the entropy bonus."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """How weights are published, and which stay on disk."""

    keep_last: int = 4
    keep_all: bool = False
    """Keep every version: `primerl verify` needs them."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of what engines load; what the model computes in where it is left out."""
    max_shard_bytes: int = 5_000_000_000
    """Size of a file of weights above which another one is begun."""
    transport: Literal["files", "collective"] = "files"
    """`collective`: ranks also send what they have published to engines that ask for it; see `transfer`."""
    probe: bool = True
    """Publish what the trainer computes of a few tokens, for engines to be held to; see `probe`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeightsConfig:
    """The model folders `weights/step_<N>`."""

    only_last: bool = False
    """Not with every checkpoint."""
    save_adapter_separately: bool = False
    """The adapter in peft's layout, in `lora_adapters`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """From what a trainer that was stopped goes on."""

    interval: int | None = None
    """Steps between checkpoints; at the end only where it is left out."""
    keep_last: int = 1
    """The batches after the oldest of them are kept too."""
    keep_interval: int | None = None
    """Those at multiples of this step are kept too."""
    weights_only: bool = False
    """Save `weights/step_<N>` in place of checkpoints."""
    resume_step: int | None = None
    """Go on from the checkpoint of this step, and not from the newest (also -1)."""
    weights: CheckpointWeightsConfig = field(default_factory=CheckpointWeightsConfig)

    @property
    def goes_back_to(self) -> int | None:
        """The step that is named; None for the newest."""
        return None if self.resume_step == -1 else self.resume_step


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, kw_only=True)
class ComputationConfig:
    """How a model is trained, whatever it is trained on."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the model's computations; bfloat16 on a GPU, float32 on a CPU, where it is left out. Weights are updated in
    fp32, and gradients added up in it."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """What the backward pass computes again: nothing, whole layers, or all of a layer but its matrix products."""
    compile: bool = False
    """Compile each layer with `torch.compile`."""
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice."""
    ranks: int = 1
    """Processes that train, a GPU each, with the model divided among them."""
    dp_replicate: int = 1
    """Groups of ranks that each hold the whole model between them (HSDP)."""
    context_parallel: int = 1
    """Ranks that share a sequence; only 1 is supported."""
    dist_timeout_s: float = 600.0
    """Give up when another rank has not come this long to where all meet."""
    peak_tflops: float | None = None
    """Of the device, for `perf/mfu`; that of `peaks.PEAKS` where it is left out."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(ComputationConfig):
    """Settings of `primerl trainer`."""

    output_dir: str
    orchestrator_url: str
    max_steps: int
    model: ModelConfig
    seed: int = 0
    environments: list[str] = field(default_factory=list)
    """Names of the orchestrator's environments, in its order, for the metrics."""
    distributions_interval: int | None = None
    """Steps between histograms of what tokens are measured for; none where it is left out."""
    stored_adapters_interval: int | None = None
    """Steps between adapters that are stored; none, or only the last one, where it is left out."""
    orchestrator_timeout_s: float = 60.0
    """Give up when the orchestrator has not answered for this long."""
    batch_timeout_s: float = 1800.0
    """Give up when the orchestrator answers, but one batch takes longer than this."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    ckpt: CheckpointConfig | None = None
    log: LogConfig = field(default_factory=LogConfig)
    metrics_port: int | None = None
    """Of Prometheus's `/metrics`; 0: any free one; None: off."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainerConfig:
        config = read(cls, values)
        _check_port(config.metrics_port)
        _check_optim(config.optim)
        check_ranks(config)
        _at_least(config, "max_steps", 1)
        _at_least(config, "threads", 0)
        if config.distributions_interval is not None:
            _at_least(config, "distributions_interval", 1)
        if config.stored_adapters_interval is not None:
            _at_least(config, "stored_adapters_interval", 1)
        _at_least(config.weights, "keep_last", 2, "weights.")
        _at_least(config.weights, "max_shard_bytes", 1, "weights.")
        lora = config.model.lora
        if config.weights.dtype is not None and lora is not None and lora.broadcast == "adapter":
            raise ConfigError("weights.dtype: adapters are published in float32 (model.lora.broadcast); leave it out")
        if config.ckpt is not None:
            check_checkpoints(config.ckpt)
        _check_loss(config.loss)
        check_lora(config.model.lora, CheckpointWeightsConfig() if config.ckpt is None else config.ckpt.weights)
        if config.model.lora is not None and config.model.lora.dropout:
            raise ConfigError(
                f"model.lora.dropout is {config.model.lora.dropout}; the trainer's probabilities would not be the "
                "engine's, which has no dropout; set it to 0"
            )
        for name in ("orchestrator_timeout_s", "batch_timeout_s"):
            _above_zero(config, name)
        return config


def _check_port(port: int | None) -> None:
    if port is None:
        return
    from primerl.net.prometheus import check_port

    try:
        check_port(port)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_checkpoints(ckpt: Any) -> None:
    """Of the trainer and of supervised fine-tuning. Raises ConfigError."""
    for name in ("interval", "keep_last", "keep_interval"):
        if getattr(ckpt, name) is not None:
            _at_least(ckpt, name, 1, "ckpt.")
    check_resume(ckpt.resume_step, weights_only=ckpt.weights_only)


def check_resume(step: int | None, *, weights_only: bool) -> None:
    """Raises ConfigError."""
    if step is not None and step < 1 and step != -1:
        raise ConfigError(f"ckpt.resume_step is {step}; give a step, or -1 for the newest checkpoint")
    if step is not None and weights_only:
        raise ConfigError("ckpt.weights_only saves nothing to go on from; leave it out, or ckpt.resume_step")


YEAR_S = 365 * 24 * 3600
"""Longest that a deadline may be."""

NO_CONTEXT_PARALLEL = (
    "only 1 is supported: torch's context parallelism divides each sequence evenly and attends over all of its row, "
    "while rows here are packed with sequences of any length that may not see each other; raise `ranks` (each has "
    "its own sequences) or set activation_checkpointing"
)


def check_ranks(config: Any) -> None:
    """Of the trainer and of supervised fine-tuning."""
    _at_least(config, "ranks", 1)
    if config.peak_tflops is not None:
        _above_zero(config, "peak_tflops")
    _at_least(config, "dp_replicate", 1)
    if not 1.0 <= config.dist_timeout_s <= YEAR_S:
        raise ConfigError(f"dist_timeout_s is {config.dist_timeout_s:g}; it must be from 1 to {YEAR_S} (a year)")
    if config.ranks % config.dp_replicate:
        raise ConfigError(f"dp_replicate is {config.dp_replicate}; it must divide ranks ({config.ranks})")
    if config.context_parallel != 1:
        raise ConfigError(f"context_parallel is {config.context_parallel}; {NO_CONTEXT_PARALLEL}")


def _check_loss(loss: LossConfig) -> None:
    from primerl.train import losses

    for name in ("rl_weight", "ce_weight", "ref_kl_weight", "entropy_weight"):
        _at_least(loss, name, 0.0, "loss.")
    _above_zero(loss, "ref_kl_max_ratio", "loss.")
    if not (loss.rl_weight or loss.ce_weight or loss.ref_kl_weight):
        raise ConfigError("loss.rl_weight, loss.ce_weight and loss.ref_kl_weight are all 0; nothing is trained")
    if loss.entropy_weight and not loss.rl_weight:
        raise ConfigError("loss.entropy_weight is set, but loss.rl_weight is 0; the bonus is over the rl tokens")
    if loss.custom is None:
        losses.REGISTRY.options(loss.type, loss.args, "loss.")
    elif loss.type != "dppo":
        raise ConfigError(f"loss.custom and loss.type ({loss.type!r}) are both set; leave one of the two out")
    elif not re.fullmatch(r"[\w.]+:\w+", loss.custom):
        raise ConfigError(f"loss.custom is {loss.custom!r}; it must be like package.module:function")


def check_lora(lora: LoraConfig | None, weights: CheckpointWeightsConfig) -> None:
    """Raises ConfigError."""
    if lora is None:
        if weights.save_adapter_separately:
            raise ConfigError("ckpt.weights.save_adapter_separately: there is no `model.lora`, so no adapter to save")
        return
    _at_least(lora, "rank", 1, "model.lora.")
    _above_zero(lora, "alpha", "model.lora.")
    if not 0.0 <= lora.dropout < 1.0:
        raise ConfigError(f"model.lora.dropout is {lora.dropout}; it must be in [0, 1)")
    if not lora.target_modules or (ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1):
        raise ConfigError(f"model.lora.target_modules is {lora.target_modules}; name layers, or {ALL_LINEAR} alone")


def _check_optim(optim: OptimConfig) -> None:
    from primerl.train import optimizers

    optimizers.REGISTRY.options(optim.type, optim.args, "optim.")
    for pattern, decay in optim.weight_decay_by_name.items():
        if not 0 <= decay < float("inf"):
            raise ConfigError(f"optim.weight_decay_by_name.{pattern} is {decay}; it must be at least 0")
    if optim.decay_steps is not None:
        _at_least(optim, "decay_steps", 1, "optim.")
    for name in ("lr", "eps", "max_norm"):
        _above_zero(optim, name, "optim.")
    for name in ("weight_decay", "warmup_steps", "final_lr_ratio"):
        _at_least(optim, name, 0, "optim.")
    if not all(0.0 <= beta < 1.0 for beta in optim.betas):
        raise ConfigError(f"optim.betas is {list(optim.betas)}; both must be in [0, 1)")


def _at_least(owner: object, name: str, least: float, prefix: str = "") -> None:
    value = getattr(owner, name)
    if not value >= least:
        raise ConfigError(f"{prefix}{name} is {value}; it must be at least {least}")


def _above_zero(owner: object, name: str, prefix: str = "") -> None:
    value = getattr(owner, name)
    if not value > 0:
        raise ConfigError(f"{prefix}{name} is {value}; it must be above 0")
