"""The settings of one env worker, and of those of this machine that join a run on another one."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from primerl.config.schema.base import (
    Count,
    CountOrZero,
    Name,
    Port,
    Processes,
    RolloutLog,
    Seconds,
    Section,
    Seed,
    Settings,
)
from primerl.config.schema.environment import Interpreter, Limits, MemoryMb, check_ports
from primerl.config.schema.services import TailnetNode


class EnvWorkerConfig(Section):
    """One env worker process (`primerl env-worker @ file`). Workers for a run on another machine: `primerl env-worker
    --join URL --env NAME`, whose keys `primerl env-worker --join --help` shows."""

    orchestrator_url: str = Field(min_length=1)
    """URL of the run's orchestrator."""
    environment: Name
    """Name of the environment in the run."""
    role: Literal["train", "eval"] = "train"
    """Whether its rollouts are trained on."""
    worker_name: str = ""
    """Unique name of this process; default: made from host and process id."""
    id: str = Field(min_length=1)
    """Name of the installed verifiers environment."""
    args: Settings = {}
    """Settings of the environment, its taskset's under `taskset`, its harness's under `harness`."""
    seed: Seed = 0
    """Seed of the order of examples; the same in all workers of an environment."""
    held_out: CountOrZero = 0
    """Number of examples skipped at the front of the list; the same in all workers of an environment."""
    max_concurrent: Count = 128
    """Rollouts run at the same time."""
    memory_mb: MemoryMb | None = None
    """Memory, in MiB, that the process may allocate, and each process that the environment starts."""
    cpus: Count | None = None
    """Cores that the process may run on, and each process that the environment starts (CPU affinity, Linux)."""
    first_cpu: CountOrZero = 0
    """Which of the machine's cores these begin with, in their order, from 0 and around: workers of one machine are
    spread over it."""
    unreachable_s: Seconds = 60.0
    """Give up after the orchestrator did not answer for this long."""
    limits: Limits = Limits()
    log: RolloutLog = RolloutLog()
    metrics_port: Port | None = None
    """Serve Prometheus's `/metrics` on this port of this machine; 0: any free one, which the log shows. Off if
    unset."""
    tailnet: TailnetNode | None = None
    """The node of a tailnet that the worker is, with TAILSCALE_AUTH_KEY of its environment; none if unset."""


class JoinConfig(Section):
    """Env workers of this machine for a run on another one (`primerl env-worker --join URL --env NAME`)."""

    join: str
    """URL of the run's orchestrator, `http://host:port`, as this machine reaches it; the run's key is read from
    `PRIMERL_API_KEY`."""
    env: Name
    """Name of the environment in the run."""
    role: Literal["train", "eval"] | None = None
    """Whether its rollouts are trained on; default: the run's setting."""
    workers: Processes = 1
    """Worker processes."""
    python: Interpreter | None = None
    max_concurrent: Count | None = None
    """Rollouts one worker runs at the same time; default: the run's."""
    memory_mb: MemoryMb | None = None
    """Memory, in MiB, that a worker may allocate, and each process that its environment starts; default: the run's."""
    cpus: Count | None = None
    """Cores of this machine that a worker may run on, and each process that its environment starts; default: the
    run's."""
    fork_server: bool = True
    """Fork the workers from a server that imports their libraries once for all of them (Linux); without, each imports
    them itself."""
    wait_s: Seconds = 300.0
    """How long the orchestrator may be away (not up yet, or being restarted) before the workers give up."""
    log_dir: str = Field(default="logs", min_length=1)
    """Folder of the workers' logs, `envs/<role>/<env>/env_worker_<n>.log` in it."""
    env_files: list[str] = []
    """Files of variables (`NAME=value` lines) that the workers get in their environment; the run's are not sent."""
    metrics_port: Port | None = None
    """Serve Prometheus's `/metrics` on this port, the next worker on the next one; 0: any free ones, which the logs
    show. Off if unset."""

    @model_validator(mode="after")
    def _every_worker_has_a_port(self) -> Self:
        check_ports(self.metrics_port, self.workers, "workers")
        return self
