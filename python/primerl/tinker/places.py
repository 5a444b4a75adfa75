"""Where a server's trainer, which is its own process, and its engines run, and which GPUs they get."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import ProcessConfig, process, shared
from primerl.config.schema.inference import EngineModel, InferenceConfig, InferenceSettings
from primerl.config.schema.serve import ServeConfig
from primerl.inference import backends
from primerl.launch.placement import gpus
from primerl.launch.placement.commands import role_of
from primerl.launch.placement.protocol import Placement, PlacementError, Plan, Resources, Role, machines
from primerl.launch.placement.sharing import on_one_gpu
from primerl.net import addresses
from primerl.run_key import VARIABLE
from primerl.tinker.checks import Checked

TRAINER = "trainer"


def engine_gpus(config: ServeConfig, backend: str) -> int:
    """GPUs that one engine asks for."""
    source = config.inference
    return backends.named(backend).gpus(source.device, source.options or source.vllm)


def with_share(config: ServeConfig, backend: str) -> tuple[ServeConfig, str | None]:
    """As `sharing.on_one_gpu`, of a server."""
    return on_one_gpu(config, backend, engine_gpus(config, backend))


def engine_share(config: ServeConfig, backend: str) -> float | None:
    """An engine's part of the memory of the trainer's GPU, where they share it."""
    share, wanted = config.deployment.engine_share, engine_gpus(config, backend) * config.inference.replicas
    return None if share is None or not wanted else share / wanted


def trainer_share(config: ServeConfig) -> float | None:
    share = config.deployment.engine_share
    return None if share is None else round(1.0 - share, 6)


@dataclass(frozen=True)
class Starting:
    """What engines are started with, and a plan does not need."""

    served: Path
    """The model's folder, as engines load it."""
    url: str
    """At which they join the server."""
    key: str
    """By which they do."""


def engines(config: ServeConfig, checked: Checked, starting: Starting | None = None) -> list[ProcessConfig]:
    """A process for each."""
    source = config.inference
    trusted = config.model.trust_remote_code
    options = backends.vllm_options(source.backend, checked.backend, source.vllm, trusted=trusted)
    found = []
    for index in range(source.replicas):
        name = f"engine_{index}"
        resolved = InferenceConfig.model_validate(
            {
                **shared(source, InferenceSettings),
                "vllm": options,
                "backend": checked.backend,
                "gpu_share": engine_share(config, checked.backend),
                "start_s": config.timeouts.start_s,
                "max_model_len": checked.context,
                "logprobs_mode": "raw_logprobs",
                "model": EngineModel(
                    path=os.fspath(checked.folder if starting is None else starting.served), name=checked.folder.name
                ),
                "seed": index,
                "join": None if starting is None else starting.url,
                "join_as": name,
                "log": config.log,
            }
        )
        variables = {} if starting is None else {VARIABLE: starting.key}
        found.append(process(config, "inference", name, resolved, threads=source.threads, variables=variables))
    return found


def plan(placement: Placement, config: ServeConfig, engines: Iterable[ProcessConfig]) -> Plan:
    """The trainer first. Raises ConfigError where they cannot be placed."""
    own, also = machines(placement).own_node(), ""
    if own is not None:
        also = ". The trainer is in this command's own process: start that on a node of the cluster that has enough"
    resources = Resources(1, max(1, config.trainer.threads), share=trainer_share(config), nodes=own)
    try:
        return placement.plan([Role(TRAINER, TRAINER, resources), *(role_of(one) for one in engines)])
    except PlacementError as error:
        *others, last = error.problems
        raise ConfigError.of([*others, last.worded(f"{last}{also}")]) from None


def check_reached(host: str, placement: Placement, plan: Plan) -> None:
    """Raises ConfigError where the server listens at its machine's loopback, and engines that join it are elsewhere."""
    own, *others = plan.places
    away = next((place for place in others if place.host != own.host), None)
    if away is None or not addresses.is_loopback(host):
        return
    # All nodes of a cluster for trials are reached at this machine's loopback.
    if not addresses.is_loopback(machines(placement).own_address()):
        raise ConfigError.at(
            "host",
            f"{host} is reached from the trainer's node alone, and {away.role.name}, which joins the server "
            f"there, would be on another ({away.host}); set host to 0.0.0.0, or to an address of the trainer's node",
        )


def take(placement: Placement, plan: Plan) -> None:
    """Has CUDA show this process the trainer's GPU as the first, which torch takes. To be called before torch has
    looked. On one machine engines see what this process sees, so it is not shown less."""
    own = machines(placement).own_gpus(TRAINER)
    if own is not None:
        if own:
            os.environ[gpus.VARIABLE] = ",".join(own)
        return
    (place,) = (place for place in plan.places if place.role.name == TRAINER)
    if place.gpus and gpus.VARIABLE not in os.environ:
        # As the placement counts them.
        os.environ.setdefault(gpus.ORDER, gpus.BY_BUS)
