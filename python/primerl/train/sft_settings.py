"""Settings of supervised fine-tuning, as those of the trainer (`settings`); `primerl.config.schema.sft` says what they
mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from primerl.models.tiny import TinyConfig
from primerl.train.data.tables import BUILDERS, COMPRESSED
from primerl.train.settings import (
    CheckpointWeightsConfig,
    ComputationConfig,
    LogConfig,
    LoraConfig,
    OptimConfig,
)

FILE_KINDS = re.compile(rf"(?<=.)({'|'.join(map(re.escape, sorted({*BUILDERS, *COMPRESSED}, reverse=True)))})\b")
"""Ends of the names of files of rows."""

LongRows = Literal["drop", "truncate", "error"]
ControlTokens = Literal["keep", "neutralize"]


@dataclass(frozen=True, kw_only=True)
class SFTModelConfig:
    path: str | None
    tiny: TinyConfig | None
    trust_remote_code: bool
    lora: LoraConfig | None


@dataclass(frozen=True, kw_only=True)
class LossMaskConfig:
    system: bool
    user: bool
    assistant: bool
    tool: bool


@dataclass(frozen=True, kw_only=True)
class SubsetConfig:
    path: str
    name: str | None
    split: str
    ratio: float | None
    label: str | None

    @property
    def title(self) -> str:
        return title_of(self.path, self.name, self.label)


def title_of(path: str, name: str | None, label: str | None) -> str:
    """A dataset's label, or one made from the path (`data/chats.jsonl` -> `chats`, `org/set` -> `set`)."""
    if label is not None:
        return label
    last = path.rstrip("/").rsplit("/", 1)[-1]
    stem = FILE_KINDS.sub("", last)
    text = stem if name is None else f"{stem}-{name}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:100] or "data"


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    path: str | None
    name: str | None
    split: str
    subsets: list[SubsetConfig]
    long_rows: LongRows
    max_bad_share: float

    @property
    def datasets(self) -> list[SubsetConfig]:
        """`subsets`, or the one that `path` is."""
        if self.path is None:
            return self.subsets
        return [SubsetConfig(path=self.path, name=self.name, split=self.split, ratio=None, label=None)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(RowsConfig):
    batch_size: int
    seq_len: int
    epochs: int | None
    shuffle: bool
    seed: int | None
    loss_mask: LossMaskConfig
    control_tokens: ControlTokens


@dataclass(frozen=True, kw_only=True)
class ValidationDataConfig(RowsConfig):
    seq_len: int | None
    loss_mask: LossMaskConfig | None


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    interval: int
    at_start: bool
    data: ValidationDataConfig


@dataclass(frozen=True, kw_only=True)
class SFTCheckpointConfig:
    interval: int | None
    keep_last: int | None
    keep_interval: int | None
    weights_only: bool
    resume_step: int | None
    weights: CheckpointWeightsConfig


NO_CHECKPOINTS = SFTCheckpointConfig(
    interval=None,
    keep_last=None,
    keep_interval=None,
    weights_only=True,
    resume_step=None,
    weights=CheckpointWeightsConfig(only_last=False, save_adapter_separately=False),
)
"""What is saved without `ckpt`: weights of the last step."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ComputationConfig):
    """Settings of `primerl sft`."""

    output_dir: str
    max_steps: int | None
    model: SFTModelConfig
    data: DataConfig
    val: ValidationConfig | None
    seed: int
    optim: OptimConfig
    ckpt: SFTCheckpointConfig | None
    log: LogConfig

    @property
    def data_seed(self) -> int:
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def resumes(self) -> bool:
        return self.ckpt is not None and self.ckpt.resume_step is not None
