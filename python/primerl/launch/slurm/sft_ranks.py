"""The ranks of a supervised fine-tuning on several nodes of a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.schema.sft import SFTConfig
from primerl.launch.placement.protocol import Command, Placement, PlacementError, Plan, Resources, Role
from primerl.launch.placement.registry import chosen
from primerl.launch.preflight.sft import CONFIG_FILE
from primerl.launch.supervise.failures import FAILED, INTERRUPTED
from primerl.launch.supervise.watching import TICK_S, Interrupted, Interrupts

NAME = "sft"
LOG = Path("logs") / f"{NAME}.log"
STOP_S = 15.0


def plan(config: SFTConfig, placement: Placement) -> Plan:
    """Raises ConfigError where they cannot be placed."""
    try:
        return placement.plan([_role(config)])
    except PlacementError as error:
        raise ConfigError(str(error).replace("trainer.ranks", "ranks")) from None


def _role(config: SFTConfig) -> Role:
    return Role(NAME, "sft", Resources(gpus=config.ranks, cpus=config.ranks), config.ranks)


def run(config: SFTConfig, folder: Path, say: Callable[[str], None]) -> int:
    """Returns the exit code: that of the first rank that failed, by 128 and its number where a signal has killed it."""
    placement = chosen(config.deployment)
    plan(config, placement)
    argv = [sys.executable, "-m", "primerl", "sft", "@", os.fspath(folder / CONFIG_FILE)]
    say(f"{config.ranks} ranks on {config.deployment.num_train_nodes} nodes, logs in {folder / LOG.parent}")
    interrupts = Interrupts()
    with placement, interrupts:
        process = placement.start(_role(config), Command(argv, os.environ, folder / LOG))
        try:
            while not process.ended:
                placement.watch(TICK_S)
                interrupts.check()
        except Interrupted:
            placement.stop(grace_s=STOP_S)
            return INTERRUPTED
    if process.code != 0:
        say(f"{NAME} {process.describe_end()}; its log is {folder / LOG}")
    code = process.code
    return FAILED if code is None else 128 - code if code < 0 else code
