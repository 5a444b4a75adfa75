"""Settings of supervised fine-tuning: plain dataclasses, read as those of the trainer (`config`)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from primerl.models.tiny import TinyConfig
from primerl.train.data.tables import BUILDERS, COMPRESSED
from primerl.train.reader import ConfigError, read
from primerl.train.settings import (
    CheckpointWeightsConfig,
    ComputationConfig,
    LogConfig,
    LoraConfig,
    OptimConfig,
    _above_zero,
    _at_least,
    _check_optim,
    check_checkpoints,
    check_lora,
    check_ranks,
)

MOST_RATIO = 1e12
"""Of a subset: sums of larger ones would lose the smaller, or overflow."""

FILE_KINDS = re.compile(rf"(?<=.)({'|'.join(map(re.escape, sorted({*BUILDERS, *COMPRESSED}, reverse=True)))})\b")
"""Ends of the names of files of rows."""

LongRows = Literal["drop", "truncate", "error"]


@dataclass(frozen=True, kw_only=True)
class SFTModelConfig:
    """The model to start from: `path`, or `tiny` to make one from scratch (exactly one of them)."""

    path: str | None = None
    tiny: TinyConfig | None = None
    lora: LoraConfig | None = None


@dataclass(frozen=True, kw_only=True)
class LossMaskConfig:
    """Whose messages are trained on."""

    system: bool = False
    user: bool = False
    assistant: bool = True
    tool: bool = False


@dataclass(frozen=True, kw_only=True)
class SubsetConfig:
    """One dataset."""

    path: str
    """A file, a folder, or a name on the Hugging Face hub; see `sources`."""
    name: str | None = None
    """Configuration of a dataset that has several."""
    split: str = "train"
    ratio: float | None = None
    """Share of the samples, relative to the other subsets'."""
    label: str | None = None

    @property
    def title(self) -> str:
        """The label, or one made from the path (`data/chats.jsonl` -> `chats`, `org/set` -> `set`)."""
        if self.label is not None:
            return self.label
        last = self.path.rstrip("/").rsplit("/", 1)[-1]
        stem = FILE_KINDS.sub("", last)
        text = stem if self.name is None else f"{stem}-{self.name}"
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:100] or "data"


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Rows of conversations: `path`, or several `subsets`."""

    path: str | None = None
    name: str | None = None
    split: str = "train"
    subsets: list[SubsetConfig] = field(default_factory=list)
    long_rows: LongRows = "drop"
    max_bad_share: float = 0.01
    """A dataset of whose rows more cannot be used stops the run before it trains."""

    @property
    def datasets(self) -> list[SubsetConfig]:
        """`subsets`, or the one that `path` is."""
        if self.path is None:
            return self.subsets
        return [SubsetConfig(path=self.path, name=self.name, split=self.split)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(RowsConfig):
    """Rows to imitate."""

    batch_size: int = 16384
    """Tokens a step."""
    seq_len: int = 2048
    """Tokens of a packed micro-batch, and of the longest row."""
    epochs: int | None = None
    shuffle: bool = True
    seed: int | None = None
    """Order of the rows; the run's own `seed` when left out."""
    loss_mask: LossMaskConfig = field(default_factory=LossMaskConfig)


@dataclass(frozen=True, kw_only=True)
class ValidationDataConfig(RowsConfig):
    """Rows that are only measured."""

    seq_len: int | None = None
    """That of the training data when left out, as is `loss_mask`."""
    loss_mask: LossMaskConfig | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Loss on rows that are not trained on."""

    interval: int = 100
    at_start: bool = True
    data: ValidationDataConfig


@dataclass(frozen=True, kw_only=True)
class SFTCheckpointConfig:
    """What is saved on the way."""

    interval: int | None = None
    """Steps between saves; the last step only when left out."""
    keep_last: int | None = None
    """All when left out."""
    keep_interval: int | None = None
    weights_only: bool = False
    resume_step: int | None = None
    """-1: the newest."""
    weights: CheckpointWeightsConfig = field(default_factory=CheckpointWeightsConfig)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ComputationConfig):
    """Settings of `primerl sft`."""

    output_dir: str
    max_steps: int | None = None
    model: SFTModelConfig
    data: DataConfig
    val: ValidationConfig | None = None
    seed: int = 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    ckpt: SFTCheckpointConfig | None = None
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def data_seed(self) -> int:
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def resumes(self) -> bool:
        return self.ckpt is not None and self.ckpt.resume_step is not None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SFTConfig:
        config = read(cls, values)
        _check_optim(config.optim)
        check_ranks(config)
        _at_least(config, "threads", 0)
        _check_length(config)
        _check_rows(config.data, "data.")
        if config.val is not None:
            _at_least(config.val, "interval", 1, "val.")
            _check_rows(config.val.data, "val.data.")
            if any(subset.ratio is not None for subset in config.val.data.subsets):
                raise ConfigError("val.data.subsets: a validation reads every row once; leave `ratio` out")
        if config.ckpt is not None:
            check_checkpoints(config.ckpt)
        if (config.model.path is None) == (config.model.tiny is None):
            raise ConfigError("model: give either `path` (a model folder) or a table `[model.tiny]`, not both")
        check_lora(config.model.lora, CheckpointWeightsConfig() if config.ckpt is None else config.ckpt.weights)
        return config


def _check_length(config: SFTConfig) -> None:
    if config.max_steps is None and config.data.epochs is None:
        raise ConfigError("set `max_steps` or `data.epochs` (or both: training ends with what comes first)")
    if config.max_steps is not None:
        _at_least(config, "max_steps", 1)
    if config.data.epochs is not None:
        _at_least(config.data, "epochs", 1, "data.")
    if config.data.batch_size < config.data.seq_len:
        raise ConfigError(
            f"data.batch_size is {config.data.batch_size}, data.seq_len {config.data.seq_len}: a step counts its "
            "tokens and has to hold the longest row; raise data.batch_size or lower data.seq_len"
        )
    if not any(vars(config.data.loss_mask).values()):
        raise ConfigError("data.loss_mask leaves nothing to train on; set one of its keys to true")


def _check_rows(rows: DataConfig | ValidationDataConfig, prefix: str) -> None:
    if (rows.path is None) == (not rows.subsets):
        is_named = rows.path is None and rows.name is not None
        hint = "; `name` is a configuration of the dataset, which is `path` (prime-rl calls that `name`)"
        raise ConfigError(
            f"{prefix.rstrip('.')}: give either `path` or `[[{prefix}subsets]]`, not both{hint if is_named else ''}"
        )
    if rows.subsets and (rows.name is not None or rows.split != "train"):
        raise ConfigError(f"{prefix}subsets: `name` and `split` belong into each subset")
    if rows.seq_len is not None:
        _at_least(rows, "seq_len", 2, prefix)
    if not 0.0 <= rows.max_bad_share <= 1.0:
        raise ConfigError(f"{prefix}max_bad_share is {rows.max_bad_share}; it is a share, from 0 to 1")
    with_ratio = [subset.ratio is not None for subset in rows.subsets]
    if any(with_ratio) and not all(with_ratio):
        raise ConfigError(f"{prefix}subsets: give `ratio` for all of them, or for none (each row once an epoch)")
    for index, subset in enumerate(rows.subsets):
        if subset.ratio is not None:
            _above_zero(subset, "ratio", f"{prefix}subsets[{index}].")
            if subset.ratio > MOST_RATIO:
                raise ConfigError(
                    f"{prefix}subsets[{index}].ratio is {subset.ratio:g}; it must be at most {MOST_RATIO:g}; what "
                    "counts is each one's share of their sum"
                )
    for title, times in Counter(subset.title for subset in rows.subsets).items():
        if times > 1:
            raise ConfigError(f"{prefix}subsets: {times} of them are called {title!r}; set `label` to tell them apart")
