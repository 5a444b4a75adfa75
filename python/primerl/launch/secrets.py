"""What env workers get to see and no other process of a run."""

from __future__ import annotations

from dataclasses import replace

from primerl.config.environment import EnvWorkerConfig
from primerl.config.resolve import ProcessConfig
from primerl.config.rl import RLConfig
from primerl.runs import secrets


def environment_of_workers(config: RLConfig, label: str) -> dict[str, str]:
    """Variables for the workers of the environment of that name in the run. Raises StateError where the stored secrets
    cannot be read."""
    entries = [*config.orchestrator.train.env, *config.orchestrator.eval.env]
    ids = [entry.id.split("@", 1)[0] for entry in entries if entry.label == label]
    known_as = [name for one in ids for name in (one.rsplit("/", 1)[-1], one)]
    return secrets.of_environment(*known_as, label)


def with_variables(config: RLConfig, process: ProcessConfig) -> ProcessConfig:
    """The process, with what it gets to see; others than env workers as they are."""
    if not isinstance(process.config, EnvWorkerConfig):
        return process
    return replace(process, variables=environment_of_workers(config, process.config.environment))
