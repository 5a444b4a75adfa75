"""Settings of one env worker: names and types of the keys in a resolved file; `EnvWorkerConfig` of
`primerl.config.schema.env_worker` says what they mean, and has their defaults and bounds."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Literal

from primerl.envs.limits import RolloutLimits
from primerl.envs.tailnet import TailnetConfig
from primerl.process.log_levels import LogLevel


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    level: LogLevel
    vf_level: LogLevel


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    orchestrator_url: str
    environment: str
    id: str
    role: Literal["train", "eval"]
    worker_name: str
    args: dict[str, Any]
    seed: int
    held_out: int
    max_concurrent: int
    memory_mb: int | None
    cpus: int | None
    first_cpu: int
    unreachable_s: float
    limits: RolloutLimits
    log: LogConfig
    metrics_port: int | None
    tailnet: TailnetConfig | None

    @property
    def name(self) -> str:
        """With the process id, so that a restarted worker is not taken for the one that died."""
        return f"{self.worker_name or socket.gethostname()}:{os.getpid()}"
