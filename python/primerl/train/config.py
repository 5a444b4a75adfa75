"""Settings of the trainer: plain dataclasses read from a mapping (a parsed TOML file). Those of supervised fine-tuning
are in `sft_config`.

This package cannot use the config library of the command line, which reads the same keys; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


class ConfigError(ValueError):
    """A setting is missing, unknown or of the wrong kind. The message names it and what to do."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy to train."""

    path: str
    """Folder of a Hugging Face checkpoint with tokenizer and chat template."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm."""
    schedule: Literal["constant", "linear"] = "constant"
    warmup_steps: int = 0
    final_lr_ratio: float = 0.1
    """`linear` ends at this share of `lr`."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Policy loss; see `primerl.train.loss` for the formula."""

    mask_low: float = 0.2
    """Tokens to be made less likely are left out once their probability fell by more than this."""
    mask_high: float = 0.2
    """Tokens to be made more likely are left out once their probability rose by more than this."""
    kl_tau: float = 1e-3
    """Weight of the squared log-ratio, which keeps trainer and engine together."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Which published weights stay on disk."""

    keep_last: int = 4
    keep_all: bool = False
    """Keep every version: `primerl verify` needs them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """From what a trainer that was stopped goes on."""

    interval: int | None = None
    """Steps between checkpoints; none are saved where it is left out."""
    keep_last: int = 1
    keep_interval: int | None = None
    """Those at multiples of this step are kept too."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of `primerl trainer`."""

    output_dir: str
    orchestrator_url: str
    max_steps: int
    model: ModelConfig
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice."""
    orchestrator_timeout_s: float = 60.0
    """Give up when the orchestrator has not answered for this long."""
    batch_timeout_s: float = 1800.0
    """Give up when the orchestrator answers, but one batch takes longer than this."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    ckpt: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainerConfig:
        config = read(cls, values)
        _check_optim(config.optim)
        _at_least(config, "max_steps", 1)
        _at_least(config, "threads", 0)
        _at_least(config.weights, "keep_last", 2, "weights.")
        _at_least(config.ckpt, "keep_last", 1, "ckpt.")
        for name in ("interval", "keep_interval"):
            if getattr(config.ckpt, name) is not None:
                _at_least(config.ckpt, name, 1, "ckpt.")
        for name in ("mask_low", "mask_high", "kl_tau"):
            _at_least(config.loss, name, 0.0, "loss.")
        for name in ("orchestrator_timeout_s", "batch_timeout_s"):
            _above_zero(config, name)
        return config


def read(kind: type[Config], values: object, where: str = "") -> Config:
    """Build the dataclass `kind` from a mapping; `where` is the dotted prefix of its keys in messages.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong kind.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where.rstrip('.') or 'config'}: expected a table, found {values!r}")
    hints = get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ConfigError(f"unknown setting `{where}{unknown[0]}`; known here: {', '.join(sorted(known))}")
    arguments = {}
    for name, spec in known.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], where + name)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing setting `{where}{name}`")
    return kind(**arguments)


def _convert(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return read(hint, value, name + ".")  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return _convert(inner, value, name)
    if origin is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, get_args(hint)))}")
        return value
    if origin is list:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} is {value!r}; it must be a list")
        (kind,) = get_args(hint)
        return [_convert(kind, item, f"{name}[{index}]") for index, item in enumerate(value)]
    if origin is tuple:
        kinds = get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise ConfigError(f"{name} is {value!r}; it must be a list of {len(kinds)} values")
        return tuple(_convert(kind, item, name) for kind, item in zip(kinds, value, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{name} is {value!r}; it must be of type {hint.__name__}")
    return value


def _check_optim(optim: OptimConfig) -> None:
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
