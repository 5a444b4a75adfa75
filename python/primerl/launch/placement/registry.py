"""Chooses a placement by its name: a built-in one, one that an installed package brings, or `module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from primerl.config.errors.fail import ConfigError
from primerl.config.schema.deployment import Deployment, Ray, Slurm, on_ray
from primerl.launch.placement.protocol import Placement
from primerl.process import extras, plugins

GROUP = "primerl.placements"
"""Entry points of packages: a name, and the class or the function that makes the placement."""
SLURM = "slurm"
RAY = "ray"
BUILT_IN = {
    "local": "primerl.launch.placement.local:LocalPlacement",
    SLURM: "primerl.launch.placement.slurm.placement:SlurmPlacement",
    RAY: "primerl.launch.placement.ray.placement:RayPlacement",
}


def chosen(deployment: Deployment, ray: Ray | None = None, slurm: Slurm | None = None) -> Placement:
    """`ray`, `slurm`: the config's sections, if it has them. Raises
    [`ConfigError`][primerl.config.errors.fail.ConfigError] for one that does not exist, or does not take its
    arguments."""
    ray = on_ray(deployment, ray)
    kind = deployment.type if ray is None else RAY
    made_by = _find(kind)
    args = deployment.args
    if kind == SLURM:
        names = ("num_train_nodes", "num_infer_nodes", "gpus_per_node")
        args = {**{name: getattr(deployment, name) for name in names}, **infer_gpus(slurm), **args}
    if ray is not None:
        extras.require("`[ray]`", "ray")
        nodes = {name: getattr(deployment, name) for name in ("num_train_nodes", "num_infer_nodes")}
        args = {"settings": ray, **nodes, **args}
    try:
        signature(made_by).bind(**args)
    except TypeError as error:
        raise ConfigError.at("deployment.args", f"{kind!r} does not take these args: {error}") from None
    try:
        placement: Placement = plugins.make(kind, made_by, **args)
    except plugins.PluginError as error:
        raise ConfigError.at("deployment", str(error)) from error
    missing = [call for call in ("plan", "start", "watch", "stop") if not hasattr(placement, call)]
    if missing:
        raise ConfigError.at("deployment.type", f"{kind!r} has no {', '.join(missing)}, as a placement has")
    return placement


def infer_gpus(slurm: Slurm | None) -> dict[str, int]:
    """The placement's argument for nodes of engines that have other GPUs than the trainer's."""
    if slurm is None or slurm.infer is None or slurm.infer.gpus_per_node is None:
        return {}
    return {"infer_gpus_per_node": slurm.infer.gpus_per_node}


def _find(name: str) -> Callable[..., Placement]:
    known = plugins.names(GROUP, BUILT_IN)
    if name not in known and ":" not in name:
        raise ConfigError.at(
            "deployment.type",
            f"there is no placement {name!r}; there are {', '.join(map(repr, known))}. Install the "
            "package that brings it, or name a class of your own as module:Class",
        )
    try:
        made_by = plugins.find(GROUP, name, BUILT_IN)
    except plugins.PluginError as error:
        raise ConfigError.at("deployment.type", str(error)) from error
    if not callable(made_by):
        raise ConfigError.at("deployment.type", f"{name!r} names no class or function")
    found: Callable[..., Placement] = made_by
    return found
