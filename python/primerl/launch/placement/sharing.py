"""GPUs that the trainer and the run's engines share: asked for by `deployment.engine_share`, or for lack of another."""

from __future__ import annotations

from typing import TypeVar

from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.inference import backends
from primerl.launch.placement import gpus
from primerl.launch.placement.registry import LOCAL, kind_of

C = TypeVar("C", RLConfig, ServeConfig)

ON_ONE_GPU = 0.4
"""Share of the engines where there is a single GPU."""


def applied(config: RLConfig) -> tuple[RLConfig, str | None]:
    """As `on_one_gpu`, of a run; one without engines, or with several ranks, shares nothing."""
    if not config.inference.replicas or config.trainer.ranks != 1:
        return config, None
    return on_one_gpu(config, resolve.engine_name(config), resolve.engine_gpus(config))


def on_one_gpu(config: C, backend: str, engine_gpus: int) -> tuple[C, str | None]:
    """The config, with the engines' share of a machine's only GPU where none was given; and what to say of it.
    `backend`: of its engines. `engine_gpus`: what one of them asks for."""
    deployment, source = config.deployment, config.inference
    options = backends.vllm_options(source.backend, backend, source.vllm, trusted=False)
    has_share = "gpu-memory-utilization" in {name.replace("_", "-") for name in options}
    is_here = kind_of(deployment, config.ray, config.slurm) == LOCAL
    if deployment.engine_share is not None or not is_here or has_share:
        return config, None
    if engine_gpus != 1 or len(gpus.found()) != 1:
        return config, None
    return config.implied(deployment=deployment.implied(engine_share=ON_ONE_GPU)), (
        f"this machine has one GPU, so the trainer and the engines share it: engines get {ON_ONE_GPU:.0%} of its "
        "memory (deployment.engine_share)"
    )
