"""What every command that starts processes begins with: a job that it submits, or the placement that it starts them by.

begun = placing.begun(config, say, saves=True)
if begun.submits:      # after the checks: `submission.submit`, and the same command runs within the job
    ...
else:                  # `begun.placement` starts the processes
    ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.launched import C
from primerl.launch import cluster
from primerl.launch.placement.protocol import Placement
from primerl.launch.placement.registry import chosen, engines_need_nodes
from primerl.launch.slurm import submission, within


@dataclass(frozen=True, slots=True)
class Begun(Generic[C]):
    config: C
    """With the addresses of the nodes that this command is on, where it is on some."""
    placement: Placement
    submits: bool
    """Whether this command submits a job, which the placement plans for."""
    limit: within.TimeLimit | None
    """The time limit of the job that this command runs in."""


def begun(config: C, say: Callable[[str], None], *, saves: bool) -> Begun[C]:
    """`saves`: whether there is a trainer that saves checkpoints. Raises ConfigError."""
    config = on_nodes(config)
    if submission.is_wanted(config):
        config = submission.begun(config)
        return Begun(config, submission.placement(config.deployment, config.slurm), submits=True, limit=None)
    config, limit = within.begun(config, say, saves=saves)
    placement = chosen(config.deployment, config.ray, config.slurm)
    return Begun(cluster.placed(config, placement), placement, submits=False, limit=limit)


def on_nodes(config: C) -> C:
    """Engines that only serve are on nodes of engines; there is none of a trainer."""
    if not isinstance(config, InferenceRunConfig):
        return config
    asked = config.deployment.num_infer_nodes
    least = 1 if engines_need_nodes(config.deployment, config.ray, config.slurm) else 0
    nodes = {"num_train_nodes": 0, "num_infer_nodes": max(least, asked)}
    return config.implied(deployment=config.deployment.implied(**nodes))
