"""`primerl inference`: one engine in this process, or several that it starts, here or on the nodes of a cluster."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PrivateAttr, model_validator

from primerl.config.schema.base import BadKeysError, CountOrZero, ProcessesOrZero, check_dry_run
from primerl.config.schema.deployment import Deployment, Ray, Slurm, check_places
from primerl.config.schema.inference import InferenceConfig


class InferenceRunConfig(InferenceConfig):
    """Engines that serve a model (`primerl inference @ file`)."""

    replicas: Annotated[ProcessesOrZero, Field(ge=1)] = 1
    """Engines. A single one on this machine is this process; others are started and watched by it."""
    output_dir: str = Field(default="outputs/inference", min_length=1)
    """Folder of logs, configs and `engines.json`, the list of addresses, where engines are processes of their own. If
    unset, a new one in outputs/inference, named by time and model."""
    _chosen: bool = PrivateAttr(default=False)  # output_dir was not given, but chosen here
    clean_output_dir: bool = False
    """Delete what earlier engines left in output_dir."""
    dry_run: bool = False
    """Check everything and write the configs, but start nothing; where engines have served, theirs stay."""
    restarts: CountOrZero = 5
    """How often an engine that was killed is started again within ten minutes, where it is a process of its own."""
    deployment: Deployment = Deployment()
    slurm: Slurm | None = None
    ray: Ray | None = None

    @model_validator(mode="after")
    def _has_its_nodes(self) -> Self:
        check_places(self.deployment, self.slurm, self.ray, trains=False)
        check_dry_run(dry_run=self.dry_run, clean_output_dir=self.clean_output_dir)
        if self.replicas > 1 and self.port:
            raise BadKeysError(
                f"port ({self.port}) cannot be shared by {self.replicas} replicas; set it to 0", "port", "replicas"
            )
        return self

    @property
    def is_this_process(self) -> bool:
        """Whether there is one engine, in the process that was started, and nothing to place."""
        placed = self.slurm is not None or self.ray is not None or self.deployment.type != "local"
        return self.replicas == 1 and not placed and not self.dry_run
