"""A launcher on a node of a cluster, Slurm's or Ray's: addresses that the other nodes reach, and the key of its run."""

from __future__ import annotations

import os
from pathlib import Path

from primerl import run_key
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.launched import C, Launched
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.config.schema.sft import SFTConfig

EVERYWHERE = "0.0.0.0"


def has_orchestrator(config: Launched) -> bool:
    return isinstance(config, RLConfig | EvalConfig)


def serves_others(config: Launched) -> bool:
    """Whether the processes are there for clients on other machines, also where they are on a single node."""
    return isinstance(config, InferenceRunConfig | ServeConfig)


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
