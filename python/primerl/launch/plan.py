"""`primerl rl @ FILE --plan`: where the processes of a run would be, and whether they fit there. Starts nothing, and
writes nothing."""

from __future__ import annotations

import json

from primerl.config.schema.rl import RLConfig
from primerl.launch import cluster, configs
from primerl.launch.placement import commands, fitting, sharing
from primerl.launch.placement.protocol import Placement, Plan, machines
from primerl.launch.placement.registry import chosen
from primerl.launch.preflight import hub
from primerl.launch.slurm import submission

DOES_NOT_FIT = 1


def show(config: RLConfig, *, as_json: bool) -> int:
    """Prints it; returns the exit code: 1 where something would not fit.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where the processes cannot be placed.
    """
    config, said = sharing.applied(hub.with_model(config, weights=False))
    if submission.is_wanted(config):
        placement: Placement = submission.placement(config.deployment, config.slurm)
    else:
        placement = chosen(config.deployment, config.ray, config.slurm)
    config = cluster.placed(config, placement)
    found = fits(config, placement, commands.plan(placement, configs.processes(config)))
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(filter(None, [said, found.text()])))
    return DOES_NOT_FIT if found.problems else 0


def fits(config: RLConfig, placement: Placement, plan: Plan) -> fitting.Fitting:
    """`plan`: the placement's newest one."""
    return fitting.fitting(config, plan, machines(placement).gpu_memory())
