"""Settings of one env worker."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from primerl.envs.limits import NO_LIMITS, RolloutLimits
from primerl.envs.tailnet import TailnetConfig
from primerl.net.prometheus import check_port
from primerl.process import setting_checks
from primerl.process.log_levels import LEVELS

RANGES: setting_checks.Ranges = {
    "seed": (0, setting_checks.MOST_LARGE_COUNT),
    "held_out": (0, setting_checks.MOST_COUNT),
    "max_concurrent": (1, setting_checks.MOST_COUNT),
    "memory_mb": (setting_checks.LEAST_MEMORY_MB, setting_checks.MOST_COUNT),
    "cpus": (1, setting_checks.MOST_COUNT),
    "first_cpu": (0, setting_checks.MOST_COUNT),
    "unreachable_s": (0, setting_checks.LONGEST_S),
}


@dataclass(frozen=True)
class LogConfig:
    """What is written to the worker's log."""

    level: str = "info"
    """Least severe level that is logged."""
    vf_level: str = "warn"
    """The same of verifiers' own lines. `info` has two a rollout, which cost more than many an environment."""


@dataclass(frozen=True)
class WorkerConfig:
    """One env worker process."""

    orchestrator_url: str
    """URL of the run's orchestrator."""
    environment: str
    """Name of the environment in the run."""
    id: str
    """Name of the installed verifiers environment."""
    role: Literal["train", "eval"] = "train"
    """Whether its rollouts are trained on."""
    worker_name: str = ""
    """Unique name of this process; defaults to one made from host and process id."""
    args: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment, its taskset's under `taskset`, its harness's under `harness`."""
    seed: int = 0
    """Seed of the order of examples; the same in all workers of an environment."""
    held_out: int = 0
    """Examples at the front of the list that are held out; the same in all workers of an environment."""
    max_concurrent: int = 128
    """Rollouts run at the same time."""
    memory_mb: int | None = None
    """Memory, in MiB, that the process may allocate, and each process that the environment starts."""
    cpus: int | None = None
    """Cores that the process may run on, and each process that the environment starts."""
    first_cpu: int = 0
    """Which of the machine's cores these begin with."""
    unreachable_s: float = 60.0
    """Give up after the orchestrator did not answer for this long, seconds."""
    limits: RolloutLimits = NO_LIMITS
    """Limits of each rollout of the environment."""
    log: LogConfig = LogConfig()
    metrics_port: int | None = None
    """Port of Prometheus's `/metrics`; 0: any free one; None: off."""
    tailnet: TailnetConfig | None = None
    """The node of a tailnet that it is, with `TAILSCALE_AUTH_KEY` of its environment."""

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> WorkerConfig:
        """Raises ValueError that names the key."""
        fields = {field.name: field for field in dataclasses.fields(WorkerConfig)}
        unknown = [name for name in values if name not in fields]
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; known keys are {', '.join(fields)}")
        required = [name for name, field in fields.items() if _is_required(field) and not values.get(name)]
        if required:
            raise ValueError(f"{required[0]} is missing")
        check_port(values.get("metrics_port"))
        config = WorkerConfig(
            **{
                **values,
                "log": _log_config(values.get("log", {})),
                "limits": _limits(values.get("limits", {})),
                "tailnet": _tailnet(values.get("tailnet")),
            }
        )
        setting_checks.check(config, RANGES)
        return config

    @property
    def name(self) -> str:
        """With the process id, so that a restarted worker is not taken for the one that died."""
        return f"{self.worker_name or socket.gethostname()}:{os.getpid()}"


def _limits(values: Any) -> RolloutLimits:
    if not isinstance(values, Mapping):
        raise ValueError("limits must be a table")
    try:
        return RolloutLimits.from_mapping(values)
    except ValueError as error:
        raise ValueError(f"limits: {error}") from None


def _tailnet(values: Any) -> TailnetConfig | None:
    if values is None:
        return None
    names = [field.name for field in dataclasses.fields(TailnetConfig)]
    if not isinstance(values, Mapping):
        raise ValueError(f"tailnet must be a table of {', '.join(names)}")
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ValueError(f"unknown key 'tailnet.{unknown[0]}'; known keys are {', '.join(names)}")
    missing = [name for name in ("name", "log") if not values.get(name)]
    if missing:
        raise ValueError(f"tailnet.{missing[0]} is missing")
    config = TailnetConfig(**values)
    setting_checks.check(config, {"login_s": (0, setting_checks.LONGEST_S)}, "tailnet.")
    return config


def _log_config(values: Any) -> LogConfig:
    names = [field.name for field in dataclasses.fields(LogConfig)]
    if not isinstance(values, Mapping):
        raise ValueError(f"log must be a table of {', '.join(names)}")
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ValueError(f"unknown key 'log.{unknown[0]}'; known keys are {', '.join(names)}")
    config = LogConfig(**values)
    setting_checks.check(config, {}, "log.")
    for name in names:
        if getattr(config, name) not in LEVELS:
            raise ValueError(f"log.{name} must be one of {', '.join(LEVELS)}, not {getattr(config, name)!r}")
    return config


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
