"""A launcher on a node of a cluster: addresses that the other nodes reach, the key of its run, and what is reserved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from primerl import run_key
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import absolute
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.launched import C, Launched
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.config.schema.sft import SFTConfig
from primerl.launch.placement.protocol import Placement, PlacementError, machines
from primerl.launch.supervise.failures import RefusedError

EVERYWHERE = "0.0.0.0"


def has_orchestrator(config: Launched) -> bool:
    return isinstance(config, RLConfig | EvalConfig)


def serves_others(config: Launched) -> bool:
    """Whether the processes are there for clients on other machines, also where they are on a single node."""
    return isinstance(config, InferenceRunConfig | ServeConfig)


def placed(config: C, placement: Placement) -> C:
    """With addresses that the placement's nodes reach, and a key, where it leaves them to the launcher. The stored
    config does not have them. Raises ConfigError where it has no nodes, or they do not share the folder."""
    where, folder = machines(placement), Path(absolute(config.output_dir))
    try:
        where.check_folder(folder)
        if not where.sets_hosts:
            return config
        address, has_others = where.own_address(), where.has_other_nodes()
    except PlacementError as error:
        raise ConfigError.like(error) from None
    if has_orchestrator(config) and not config.dry_run:
        make_key(folder)
    return reachable(config, address) if has_others or serves_others(config) else config


def prepare(placement: Placement, folder: Path, say: Callable[[str], None], check: Callable[[], None]) -> None:
    """Reserves the nodes, before anything starts. `check` may raise. Raises RefusedError."""
    try:
        machines(placement).prepare(folder, say, check)
    except PlacementError as error:
        raise RefusedError.like(error) from None


def reachable(config: C, address: str) -> C:
    """With an orchestrator, or a server of the Tinker API, that listens at `address`, and engines that listen
    everywhere, unless the user has said where. The stored config has neither."""
    if isinstance(config, SFTConfig):
        return config
    if isinstance(config, InferenceRunConfig):
        return config if "host" in config.model_fields_set else config.implied(host=EVERYWHERE)
    if isinstance(config, RLConfig) and "host" not in config.orchestrator.model_fields_set:
        config = config.implied(orchestrator=config.orchestrator.implied(host=address))
    if isinstance(config, ServeConfig) and "host" not in config.model_fields_set:
        config = config.implied(host=address)
    if "host" not in config.inference.model_fields_set:
        config = config.implied(inference=config.inference.implied(host=EVERYWHERE))
    if isinstance(config, EvalConfig):
        config._host = address
    return config


def make_key(folder: Path) -> None:
    """A key for the run, where none is given: other nodes reach the orchestrator, which does not listen without. It is
    in no script, no command line and no process list: this process hands it on (and so does the file of the run's
    folder that has it, which only its owner can read)."""
    if os.environ.get(run_key.VARIABLE):
        return
    os.environ[run_key.VARIABLE] = run_key.made(folder)
