"""A launcher on a node of a Ray cluster: where its processes listen, the run's key, and what is reserved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import absolute
from primerl.config.schema.rl import RLConfig
from primerl.launch.cluster import make_key, reachable
from primerl.launch.placement.protocol import Placement, PlacementError
from primerl.launch.placement.ray.placement import RayPlacement
from primerl.launch.supervise.failures import RefusedError


def placed(config: RLConfig, placement: Placement) -> RLConfig:
    """With addresses that the cluster's nodes reach, and a key. The stored config does not have them. Raises
    ConfigError where there is no cluster."""
    if not isinstance(placement, RayPlacement):
        return config
    try:
        address, has_others = placement.address, placement.has_other_nodes
    except PlacementError as error:
        raise ConfigError(str(error)) from None
    if not config.dry_run:
        make_key(Path(absolute(config.output_dir)))
    return reachable(config, address) if has_others else config


def prepare(placement: Placement, folder: Path, say: Callable[[str], None], check: Callable[[], None]) -> None:
    """Reserves the nodes, before anything starts. `check` may raise. Raises RefusedError."""
    if not isinstance(placement, RayPlacement):
        return
    try:
        placement.prepare(folder, say, check)
    except PlacementError as error:
        raise RefusedError(str(error)) from None
