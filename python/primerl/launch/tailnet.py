"""Env workers as nodes of a tailnet, as their launcher sees it: what has to be there before the start, who gets the
key, and which worker ended since its node did. The node itself is the worker's own (`primerl.envs.tailnet`)."""

from __future__ import annotations

import os

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.services import KEY_PREFIX
from primerl.envs.tailnet import KEY_VARIABLE, NODE_LOST, PROGRAMS, program
from primerl.launch.placement.protocol import Process
from primerl.launch.report.logs import last_error, own_tail
from primerl.launch.secrets import Variables
from primerl.process.redaction import note


def is_joined(config: RLConfig) -> bool:
    """Whether the run has a node."""
    return config.tailscale.enabled and bool(_labels(config))


def _labels(config: RLConfig) -> set[str]:
    """Environments with workers here: those that join from other machines have the network of their own machine."""
    entries = [*config.orchestrator.train.env, *config.orchestrator.eval.env]
    return {entry.label for entry in entries if entry.num_workers}


def check_programs(config: RLConfig) -> None:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where Tailscale is not installed."""
    missing = [name for name in PROGRAMS if program(name) is None] if is_joined(config) else []
    if missing:
        raise ConfigError(
            f"tailscale.enabled is set, and {' and '.join(missing)} cannot be found on this machine; install Tailscale "
            "(https://tailscale.com/download; its static binaries need no root) and have both programs on PATH, or "
            "leave [tailscale] out",
            "tailscale.enabled",
        )


def with_key(config: RLConfig, variables: Variables) -> Variables:
    """With the key among the variables of each environment's workers, which take it out before they load anything.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where there is none, or what is none.
    """
    if not is_joined(config):
        return variables
    keys = {label: {KEY_VARIABLE: _key(config, label, variables[label])} for label in sorted(_labels(config))}
    return {label: found | keys.get(label, {}) for label, found in variables.items()}


def _key(config: RLConfig, label: str, variables: dict[str, str]) -> str:
    """The environment's goes before what was stored or is in files, and that before the config's."""
    own = config.tailscale.auth_key
    sources = [
        (f"{KEY_VARIABLE} of the environment", os.environ.get(KEY_VARIABLE)),
        (f"{KEY_VARIABLE} of env_files or the stored secrets", variables.get(KEY_VARIABLE)),
        ("tailscale.auth_key", None if own is None else own.get_secret_value()),
    ]
    source, key = next(((name, value) for name, value in sources if value), ("", ""))
    if not key:
        raise ConfigError(
            f"tailscale.enabled is set, and there is no key for {label!r}; make a reusable auth key "
            "(https://login.tailscale.com/admin/settings/keys) and set it as "
            f"{KEY_VARIABLE}, in the environment, in a file of env_files, or by `primerl secret set {KEY_VARIABLE}`",
            "tailscale.enabled",
        )
    if not key.startswith(KEY_PREFIX):
        raise ConfigError(
            f"tailscale.enabled is set, but {source} does not begin with {KEY_PREFIX!r}; give an auth key of "
            "Tailscale, no API key",
            "tailscale.enabled",
            "tailscale.auth_key",
        )
    note([key])
    return key


def lost(described: ProcessConfig, process: Process) -> str | None:
    """Why an env worker ended that has lost its node; None of all others. A new worker has a new node."""
    if process.code != NODE_LOST:
        return None
    config = described.config
    if not isinstance(config, EnvWorkerConfig) or config.tailnet is None:
        return None
    return last_error(own_tail(process)) or "its node in the tailnet was lost"
