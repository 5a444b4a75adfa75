"""The ranks of a supervised fine-tuning where a placement starts them, such as on the nodes of a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.schema.sft import SFTConfig
from primerl.launch.placement.protocol import Command, Placement, PlacementError, Plan, Resources, Role
from primerl.launch.preflight.sft import CONFIG_FILE
from primerl.launch.role_watch import RoleWatch
from primerl.train.distributed.torchrun import NODE_RANK

NAME = "sft"
RANKS = "trainer.ranks"
"""By which placements name the key, as of a run."""
LOG = Path("logs") / f"{NAME}.log"
STOP_S = 15.0


def plan(config: SFTConfig, placement: Placement) -> Plan:
    """Raises ConfigError where they cannot be placed."""
    try:
        return placement.plan([_role(config)])
    except PlacementError as error:
        own = [problem.renamed({RANKS: "ranks"}) for problem in error.problems]
        raise ConfigError.of([problem.worded(problem.replace(RANKS, "ranks")) for problem in own]) from None


def _role(config: SFTConfig) -> Role:
    return Role(NAME, "sft", Resources(gpus=config.ranks, cpus=config.ranks), config.ranks)


def run(config: SFTConfig, folder: Path, placement: Placement, say: Callable[[str], None]) -> int:
    """Returns the exit code. `placement`: which has planned them."""
    argv = [sys.executable, "-m", "primerl", "sft", "@", os.fspath(folder / CONFIG_FILE)]
    nodes, ranks = config.deployment.num_train_nodes, config.ranks
    say(
        f"{ranks} rank{'' if ranks == 1 else 's'} on {nodes} node{'' if nodes == 1 else 's'}, logs in "
        f"{folder / LOG.parent}"
    )
    # By which the process knows that it is not a launcher; placements on several nodes number them.
    environment = {**os.environ, NODE_RANK: "0"}
    command = Command(argv, environment, folder / LOG, own=frozenset({NODE_RANK}))
    return RoleWatch(placement, folder, say).run([(_role(config), command)], grace_s=STOP_S)
