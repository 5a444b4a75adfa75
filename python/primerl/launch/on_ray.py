"""A launcher on a node of a Ray cluster: where its processes listen, the key of its run, and what is reserved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import absolute
from primerl.config.schema.launched import C
from primerl.launch.cluster import has_orchestrator, make_key, reachable, serves_others
from primerl.launch.placement.protocol import Placement, PlacementError
from primerl.launch.placement.ray.placement import RayPlacement
from primerl.launch.supervise.failures import RefusedError

UPLOADED = "/runtime_resources/working_dir_files/"
"""In the paths of folders that `ray job submit --working-dir` has uploaded."""


def placed(config: C, placement: Placement) -> C:
    """With addresses that the cluster's nodes reach, and a key. The stored config does not have them. Raises
    ConfigError where there is no cluster."""
    if not isinstance(placement, RayPlacement):
        return config
    folder = absolute(config.output_dir)
    if UPLOADED in os.path.realpath(folder):
        raise ConfigError.at(
            "output_dir",
            f"{folder} is in the folder that was uploaded for this job (`ray job submit --working-dir`), "
            "which other nodes do not share, and which Ray deletes after the job; give an absolute output_dir that all "
            "nodes share",
        )
    try:
        address, has_others = placement.address, placement.has_other_nodes
    except PlacementError as error:
        raise ConfigError.like(error) from None
    if has_orchestrator(config) and not config.dry_run:
        make_key(Path(folder))
    return reachable(config, address) if has_others or serves_others(config) else config


def prepare(placement: Placement, folder: Path, say: Callable[[str], None], check: Callable[[], None]) -> None:
    """Reserves the nodes, before anything starts. `check` may raise. Raises RefusedError."""
    if not isinstance(placement, RayPlacement):
        return
    try:
        placement.prepare(folder, say, check)
    except PlacementError as error:
        raise RefusedError.like(error) from None
