"""What a process of a run is to a placement: its role, and the command that starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.inference import InferenceConfig
from primerl.config.schema.orchestrator import OrchestratorConfig
from primerl.config.schema.trainer import TrainerConfig
from primerl.forking import servers
from primerl.forking.preload import ENVIRONMENTS, TORCH
from primerl.inference import backends
from primerl.launch.interpreters import lookup
from primerl.launch.placement.protocol import (
    Command,
    Listener,
    Placement,
    PlacementError,
    Plan,
    Process,
    Resources,
    Role,
)
from primerl.process import rank_variables, redaction
from primerl.run_key import VARIABLE, run_key

TALKS_TO_ORCHESTRATOR = ("inference", "env-worker", "trainer")
# Each of the math libraries would otherwise start a thread a core, and the processes fight for them.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def start(placement: Placement, process: ProcessConfig, *flags: str) -> Process:
    """`flags`: of this start alone."""
    return placement.start(role_of(process), command_of(process, *flags))


def plan(placement: Placement, processes: Iterable[ProcessConfig]) -> Plan:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where they cannot be placed."""
    try:
        return placement.plan([role_of(process) for process in processes])
    except PlacementError as error:
        raise ConfigError.like(error) from None


def role_of(process: ProcessConfig) -> Role:
    config, ranks = process.config, 1
    listens: tuple[Listener, ...] = ()
    resources = Resources(cpus=max(1, process.threads))
    match config:
        case TrainerConfig():
            ranks = config.ranks
            resources = Resources(ranks, ranks * max(1, process.threads), share=config.gpu_share)
        case InferenceConfig():
            wanted = _gpus(config)
            resources = Resources(wanted, max(1, process.threads), share=config.gpu_share if wanted else None)
            listens = (Listener("inference", config.host, config.port),)
        case OrchestratorConfig():
            listens = (Listener("orchestrator", config.host, config.port),)
        case EnvWorkerConfig():
            resources = Resources(cpus=config.cpus or 1, memory_mb=config.memory_mb)
    return Role(process.name, process.kind, resources, ranks, listens)


def _gpus(config: InferenceConfig) -> int:
    backend = backends.named(config.backend)
    return backend.gpus(config.device, config.options or config.vllm)


def command_of(process: ProcessConfig, *flags: str) -> Command:
    argv = [process.python or sys.executable, "-m", "primerl", process.kind, "@", os.fspath(process.file), *flags]
    environment, own = environment_of(process), set(_own_variables(process))
    if process.python is not None:
        before, folder = environment, folder_of(process) / "run" / "package"
        environment = lookup.variables(process.python, folder, before)
        own |= {name for name, value in environment.items() if before.get(name) != value}
    return Command(
        argv,
        environment,
        process.log,
        own=frozenset(own),
        hide=redaction.forms(process.variables.values()),
        preload=fork_kind(process),
    )


def folder_of(process: ProcessConfig) -> Path:
    """The output folder: configs are in its `configs`."""
    return process.file.parent.parent


def fork_kind(process: ProcessConfig) -> str | None:
    """The kind of fork server that has imported what the process needs; None where it needs little, or has an
    interpreter of its own."""
    if process.python is not None:
        return None
    if process.kind == "inference":
        return TORCH if backends.named(getattr(process.config, "backend", backends.DEFAULT)).preload else None
    return {"env-worker": ENVIRONMENTS, "trainer": TORCH}.get(process.kind)


def environment_of(process: ProcessConfig) -> dict[str, str]:
    inherited = rank_variables.without(os.environ)
    return {"OMP_WAIT_POLICY": servers.OMP_WAIT_POLICY, **inherited, **_own_variables(process)}


def _own_variables(process: ProcessConfig) -> dict[str, str]:
    """Those that are set for this process, whatever the launcher's own environment has."""
    variables = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if process.variables:
        variables[redaction.VARIABLE] = ",".join(process.variables)
    if process.kind in TALKS_TO_ORCHESTRATOR:
        key = run_key(folder_of(process))
        if key is not None:
            variables[VARIABLE] = key
    if process.kind == "trainer":
        variables[servers.VARIABLE] = servers.setting()  # for its ranks
    if process.threads:
        variables |= dict.fromkeys(THREADS, str(process.threads))
    return {**variables, **process.variables}
