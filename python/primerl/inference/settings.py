"""Settings of `primerl inference`: names and types of the keys in a resolved file; `primerl.config.schema.inference`
says what they mean, and has their defaults and bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from primerl.inference.pulling import Pulled
from primerl.process.log_levels import LogLevel


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str
    name: str | None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters that the engine is sent in place of whole weights."""

    rank: int
    target_modules: list[str]
    max_adapters: int


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    level: LogLevel


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    model: ModelConfig
    backend: str
    python: str | None
    vllm: dict[str, Any]
    options: dict[str, Any]
    start_s: float
    host: str
    port: int
    join: str | None
    join_as: str | None
    pull_to: str | None
    max_model_len: int | None
    max_num_seqs: int
    kv_cache_tokens: int | None
    seed: int
    dtype: Literal["float32", "bfloat16"] | None
    device: str
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    gpu_share: float | None
    threads: int
    enable_return_routed_experts: bool
    lora: LoraConfig | None
    log: LogConfig

    @property
    def pulled(self) -> Pulled | None:
        """Where weights are pulled from, and to."""
        return None if self.pull_to is None or self.join is None else Pulled(self.join, os.path.abspath(self.pull_to))

    @property
    def served_name(self) -> str:
        return self.model.name or Path(self.model.path).name
