"""Which GPUs the trainer, which is the server's own process, and the engines get."""

from __future__ import annotations

import os
from collections.abc import Iterable

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.serve import ServeConfig
from primerl.inference import backends
from primerl.launch.placement import gpus
from primerl.launch.placement.commands import role_of
from primerl.launch.placement.protocol import Placement, PlacementError, Plan, Resources, Role
from primerl.launch.placement.sharing import LOCAL, ON_ONE_GPU

TRAINER = "trainer"


def engine_gpus(config: ServeConfig, backend: str) -> int:
    """GPUs that one engine asks for."""
    source = config.inference
    return backends.named(backend).gpus(source.device, source.options or source.vllm)


def with_share(config: ServeConfig, backend: str) -> tuple[ServeConfig, str | None]:
    """The config, with the engines' share of a machine's only GPU where none was given; and what to say of it."""
    deployment = config.deployment
    has_share = "gpu-memory-utilization" in {name.replace("_", "-") for name in config.inference.vllm}
    if deployment.engine_share is not None or deployment.type != LOCAL or has_share:
        return config, None
    if engine_gpus(config, backend) != 1 or len(gpus.found()) != 1:
        return config, None
    return config.implied(deployment=deployment.implied(engine_share=ON_ONE_GPU)), (
        f"this machine has one GPU, so the trainer and the engines share it: engines get {ON_ONE_GPU:.0%} of its "
        "memory (deployment.engine_share)"
    )


def engine_share(config: ServeConfig, backend: str) -> float | None:
    """An engine's part of the memory of the trainer's GPU, where they share it."""
    share, wanted = config.deployment.engine_share, engine_gpus(config, backend) * config.inference.replicas
    return None if share is None or not wanted else share / wanted


def trainer_share(config: ServeConfig) -> float | None:
    share = config.deployment.engine_share
    return None if share is None else round(1.0 - share, 6)


def plan(placement: Placement, config: ServeConfig, engines: Iterable[ProcessConfig]) -> Plan:
    """The trainer first. Raises ConfigError where they cannot be placed."""
    resources = Resources(1, max(1, config.trainer.threads), share=trainer_share(config))
    try:
        return placement.plan([Role(TRAINER, TRAINER, resources), *(role_of(one) for one in engines)])
    except PlacementError as error:
        raise ConfigError(str(error)) from None


def take(plan: Plan) -> None:
    """Has CUDA count GPUs as the placement does, so that the first, which torch takes, is the one that the trainer was
    given. Engines see what this process sees, so it is not shown less. To be called before torch has looked."""
    (own,) = (place for place in plan.places if place.role.name == TRAINER)
    if own.gpus and gpus.VARIABLE not in os.environ:
        os.environ.setdefault(gpus.ORDER, gpus.BY_BUS)
