"""Chooses a placement by its name: a built-in one, one that an installed package brings, or `module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.config.schema.deployment import Deployment, Ray, Slurm, on_ray
from primerl.launch.placement.protocol import Machines, Placement
from primerl.process import extras, plugins

GROUP = "primerl.placements"
"""Entry points of packages: a name, and the class or the function that makes the placement."""
LOCAL = "local"
SLURM = "slurm"
RAY = "ray"
NODES = ("num_train_nodes", "num_infer_nodes", "gpus_per_node")
"""Keys of `[deployment]` that a placement gets as arguments, if its class has parameters of these names."""


@dataclass(frozen=True, slots=True)
class Sections:
    """Those of the config that are about one placement."""

    ray: Ray | None = None
    slurm: Slurm | None = None


@dataclass(frozen=True, slots=True)
class BuiltIn:
    path: str
    args: Callable[[Sections], dict[str, Any]] = lambda _: {}
    """What its class is made with, from a section of its own. Raises ConfigError for an extra that is missing."""


def infer_gpus(slurm: Slurm | None) -> dict[str, int]:
    """The argument for nodes of engines that have other GPUs than the trainer's."""
    if slurm is None or slurm.infer is None or slurm.infer.gpus_per_node is None:
        return {}
    return {"infer_gpus_per_node": slurm.infer.gpus_per_node}


def _of_ray(sections: Sections) -> dict[str, Any]:
    extras.require("`[ray]`", "ray")
    return {"settings": sections.ray or Ray()}


BUILT_IN = {
    LOCAL: BuiltIn("primerl.launch.placement.local:LocalPlacement"),
    SLURM: BuiltIn(
        "primerl.launch.placement.slurm.placement:SlurmPlacement", lambda sections: infer_gpus(sections.slurm)
    ),
    RAY: BuiltIn("primerl.launch.placement.ray.placement:RayPlacement", _of_ray),
}
PATHS = {name: one.path for name, one in BUILT_IN.items()}


def kind_of(deployment: Deployment, ray: Ray | None, slurm: Slurm | None) -> str:
    """The name of the placement, as the config chooses it by a type or by a section."""
    if on_ray(deployment, ray) is not None:
        return RAY
    return deployment.type if slurm is None else SLURM


def engines_need_nodes(deployment: Deployment, ray: Ray | None, slurm: Slurm | None) -> bool:
    """`Machines.engines_need_nodes` of the placement that is to be made. Raises ConfigError as `chosen` does."""
    made_by = _find(kind_of(deployment, ray, slurm))
    return isinstance(made_by, type) and issubclass(made_by, Machines) and made_by.engines_need_nodes


def chosen(deployment: Deployment, ray: Ray | None = None, slurm: Slurm | None = None) -> Placement:
    """`ray`, `slurm`: the config's sections, if it has them. Raises
    [`ConfigError`][primerl.config.errors.fail.ConfigError] for one that does not exist, or does not take its
    arguments."""
    kind = deployment.type if on_ray(deployment, ray) is None else RAY
    made_by = _find(kind)
    own = BUILT_IN[kind].args(Sections(ray, slurm)) if kind in BUILT_IN else {}
    args = {**own, **_nodes(kind, made_by, deployment), **deployment.args}
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


def _nodes(kind: str, made_by: Callable[..., Placement], deployment: Deployment) -> dict[str, int]:
    """Raises ConfigError for nodes that are asked for, and that the placement does not take. What goes with `local` the
    config's classes say: a file with `[slurm]` has it too."""
    parameters = signature(made_by).parameters
    for name, least in (("num_train_nodes", 1), ("num_infer_nodes", 0)):
        count = getattr(deployment, name)
        if kind != LOCAL and count > least and name not in parameters and name not in deployment.args:
            raise ConfigError(
                f"deployment.{name} is {count}, and the placement {kind!r} takes no {name}; omit it",
                f"deployment.{name}",
            )
    return {name: getattr(deployment, name) for name in NODES if name in parameters}


def _find(name: str) -> Callable[..., Placement]:
    known = plugins.names(GROUP, PATHS)
    if name not in known and ":" not in name:
        raise ConfigError.at(
            "deployment.type",
            f"there is no placement {name!r}; there are {', '.join(map(repr, known))}. Install the "
            "package that brings it, or name a class of your own as module:Class",
        )
    try:
        made_by = plugins.find(GROUP, name, PATHS)
    except plugins.PluginError as error:
        raise ConfigError.at("deployment.type", str(error)) from error
    if not callable(made_by):
        raise ConfigError.at("deployment.type", f"{name!r} names no class or function")
    found: Callable[..., Placement] = made_by
    return found
