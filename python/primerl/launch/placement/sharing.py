"""GPUs that the trainer and the run's engines share: asked for by `deployment.engine_share`, or for lack of another."""

from __future__ import annotations

from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.launch.placement import gpus

ON_ONE_GPU = 0.4
"""Share of the engines where there is a single GPU."""
LOCAL = "local"


def applied(config: RLConfig) -> tuple[RLConfig, str | None]:
    """The config, with the engines' share of a machine's only GPU where none was given; and what to say of it."""
    deployment = config.deployment
    if deployment.engine_share is not None or deployment.type != LOCAL or not config.inference.replicas:
        return config, None
    has_share = "gpu-memory-utilization" in {name.replace("_", "-") for name in config.inference.vllm}
    if config.slurm is not None or config.ray is not None or has_share:
        return config, None
    if resolve.engine_gpus(config) != 1 or config.trainer.ranks != 1 or len(gpus.found()) != 1:
        return config, None
    return config.implied(deployment=deployment.implied(engine_share=ON_ONE_GPU)), (
        f"this machine has one GPU, so the trainer and the engines share it: engines get {ON_ONE_GPU:.0%} of its "
        "memory (deployment.engine_share)"
    )
