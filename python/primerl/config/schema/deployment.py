"""Where the processes of a run are started, and the Slurm job or the Ray cluster that they are a part of."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from primerl.config.schema.base import (
    BadKeysError,
    Bound,
    Count,
    CountOrZero,
    Processes,
    ProcessesOrZero,
    Section,
    Settings,
)

PLACEMENT_PATTERN = r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$"
ONE_WORD = r"^[^\s\"'\\]+$"
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
EXPORT = re.compile(r"(ALL|NONE|NIL|[A-Za-z_]\w*)(,[A-Za-z_]\w*)*")
# Options of sbatch that a run depends on, and the keys that set them.
OWN_OPTIONS = {
    "--export": "slurm.export names variables; their values belong in the environment, not in the job's script",
    "--output": "the log is in output_dir",
    "--signal": "slurm.signal_s sets it",
    "--requeue": "slurm.requeue sets it",
    "--no-requeue": "slurm.requeue sets it",
}
Word = Annotated[str, Field(pattern=ONE_WORD, max_length=200), Bound("one word")]


class Deployment(Section):
    """Which placement starts the processes of the run, and where."""

    type: Annotated[str, Field(pattern=PLACEMENT_PATTERN)] = "local"
    """`local`: this machine. `slurm`: the nodes of the Slurm job that this command runs in, which `[slurm]` submits.
    `ray`: the nodes of a Ray cluster, as with `[ray]`. Else the name of an installed placement
    (entry point group `primerl.placements`), or one of your own as `module:Class`."""
    num_train_nodes: Processes = 1
    """Nodes of the trainer, of which each gets as many of `trainer.ranks`. The orchestrator runs on the first with
    Slurm, next to this command with Ray (not with `local`, as the next)."""
    num_infer_nodes: ProcessesOrZero = 0
    """Nodes of the engines; 0: those of the trainer, with Ray any."""
    gpus_per_node: CountOrZero = 0
    """GPUs that each node of Slurm has for the run (Ray knows its own); 0: everything computes on CPUs."""
    engine_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Let the engines share the trainer's GPUs, with this part of each one's memory, and the trainer the rest. If
    unset, each has GPUs of its own; where there is a single GPU, engines get 0.4 of it."""
    args: Settings = {}
    """What a placement of another package is made with."""


class Ray(Section):
    """The nodes of a Ray cluster run it (docs/ray.md)."""

    address: str = Field(default="auto", min_length=1, max_length=200)
    """`auto`: the cluster that this machine is a node of, or the job that this command runs in; or `HOST:PORT` of its
    head, on a node of the cluster."""
    namespace: Word | None = None
    """Ray's namespace of the run's actors; an anonymous one if unset."""
    export: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = []
    """Variables that processes on the nodes get from the launcher's environment, by name."""
    wait_s: Count = 300
    """How long to wait for resources that others use, and for another node after one was lost, in seconds."""

    @model_validator(mode="after")
    def _is_of_a_node(self) -> Self:
        if self.address.startswith("ray://"):
            raise BadKeysError(
                f"address ({self.address!r}) is for Ray's client, which leaves its processes running when the "
                "connection is lost; start the command on a node of the cluster, or by `ray job submit`, with "
                'address = "auto"',
                "address",
            )
        return self


class SlurmInferNodes(Section):
    """The nodes of the engines (`deployment.num_infer_nodes`), where they are to be others than the trainer's: the job
    is a heterogeneous one then. Keys that are unset are those of `[slurm]`, but for `nodelist`."""

    partition: Word | None = None
    """Partition of these nodes."""
    nodelist: Word | None = None
    """Nodes that have to be among them, such as `n[1-4]`."""
    exclude: Word | None = None
    """Nodes that must not be among them."""
    constraint: Word | None = None
    """Features that they must have."""
    cpus_per_node: Count | None = None
    """CPUs of each of them."""
    mem: Word | None = None
    """Memory of each of them, as Slurm writes it."""
    gpus_per_node: CountOrZero | None = None
    """GPUs that each of them has for the run; `deployment.gpus_per_node` if unset."""


class Slurm(Section):
    """A Slurm job that runs it instead (docs/slurm.md)."""

    job_name: Word = "primerl"
    """Name of the job."""
    partition: Word | None = None
    """Partition; the cluster's default if unset."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    time: Annotated[str, Bound("as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS")] | None = None
    """Time limit of the job; the partition's if unset."""
    nodelist: Word | None = None
    """Nodes that the job has to have, such as `n[1-4]`."""
    exclude: Word | None = None
    """Nodes that it must not have."""
    constraint: Word | None = None
    """Features that its nodes must have."""
    cpus_per_node: Count | None = None
    """CPUs of each node; all of them if unset and `exclusive`."""
    mem: Word | None = None
    """Memory of each node, as Slurm writes it (`64G`, `0` for all); the cluster's default if unset."""
    exclusive: bool = True
    """Share the nodes with no other job."""
    infer: SlurmInferNodes | None = None
    options: list[str] = []
    """More options of sbatch, such as `--reservation=mine`."""
    project_dir: str = Field(default=".", min_length=1)
    """Folder that the job, and its submission, work in: relative paths of the config begin there."""
    pre_run_command: str | None = None
    """Shell commands before the run, such as `module load cuda`."""
    template_path: str | None = Field(default=None, min_length=1)
    """A script of your own in place of the built-in one, with the same fields (docs/slurm.md)."""
    export: Annotated[str, Bound("ALL, NONE or names of variables")] = "ALL"
    """Variables that the job gets from where it is submitted, by name; values are in no file."""
    signal_s: Count = 300
    """How long before the time limit the run saves a checkpoint and stops, in seconds."""
    requeue: bool = True
    """Put the job back into the queue, where it resumes: at its time limit, when a node fails, or Slurm preempts it."""
    max_requeues: CountOrZero = 100
    """How often at its time limit."""
    dry_run: bool = False
    """Write job.sbatch, and do not submit it."""

    @model_validator(mode="after")
    def _as_slurm_reads_it(self) -> Self:
        if self.time is not None and not TIME.fullmatch(self.time):
            raise BadKeysError(
                f"time ({self.time!r}) is no time limit of Slurm; write minutes, HH:MM:SS or D-HH:MM:SS", "time"
            )
        if not EXPORT.fullmatch(self.export):
            raise BadKeysError(
                "export must be ALL, NONE or names of variables with commas between them; set their values in the "
                "environment, not here, where they would be in the job's script",
                "export",
            )
        wrong = next((one for one in self.options if not one.startswith("-") or "\n" in one), None)
        if wrong is not None:
            raise BadKeysError(f"options has {wrong!r}, which is no option of sbatch; write --name=value", "options")
        own = next((name for one in self.options for name in OWN_OPTIONS if one.startswith(name)), None)
        if own is not None:
            raise BadKeysError(f"options has {own}, which is not to be given there: {OWN_OPTIONS[own]}", "options")
        return self


def check_places(
    deployment: Deployment, slurm: Slurm | None, ray: Ray | None, *, is_sft: bool = False, trains: bool = True
) -> None:
    """Raises BadKeysError for places of processes that contradict each other, or that no one would look at.

    Args:
        is_sft: Whether the processes are the ranks of a fine-tuning alone.
        trains: Whether there are a trainer and engines, which could share GPUs or be on nodes of their own.
    """
    check_nodes(deployment, slurm, ray, is_sft=is_sft)
    check_ray(deployment, slurm, ray)
    check_sharing(deployment, slurm)
    check_infer_nodes(deployment, slurm, trains=trains and not is_sft)
    if not trains and "num_train_nodes" in deployment.model_fields_set:
        raise BadKeysError(
            "deployment.num_train_nodes counts the trainer's nodes, but this command starts only engines; set "
            "deployment.num_infer_nodes instead",
            "deployment.num_train_nodes",
        )
    if not trains and deployment.engine_share is not None:
        raise BadKeysError(
            "deployment.engine_share is a part of the trainer's GPUs, but this command starts only engines; set "
            "gpu_share instead",
            "deployment.engine_share",
        )


def on_ray(deployment: Deployment, ray: Ray | None) -> Ray | None:
    """How the run is on Ray, if it is."""
    return Ray() if ray is None and deployment.type == "ray" else ray


def check_ray(deployment: Deployment, slurm: Slurm | None, ray: Ray | None) -> None:
    """Raises BadKeysError for settings of a deployment that is not on Ray."""
    if on_ray(deployment, ray) is None:
        return
    if slurm is not None or deployment.type not in ("local", "ray"):
        other = "slurm" if slurm is not None else "deployment.type"
        raise BadKeysError(f"ray and {other} name two places for the processes; omit one of them", "ray")
    if deployment.gpus_per_node:
        raise BadKeysError(
            "deployment.gpus_per_node is not to be given with Ray, which knows the GPUs of its nodes; omit it",
            "deployment.gpus_per_node",
        )
    if deployment.engine_share is not None:
        raise BadKeysError(
            "deployment.engine_share shares GPUs of this machine alone: on Ray the trainer and each engine have GPUs "
            "of their own; omit it",
            "deployment.engine_share",
        )


def check_infer_nodes(deployment: Deployment, slurm: Slurm | None, *, trains: bool) -> None:
    """Raises BadKeysError where nodes are described that the job does not have."""
    if slurm is None or slurm.infer is None:
        return
    if not trains:
        raise BadKeysError(
            "slurm.infer describes nodes other than a trainer's, and there is no trainer; set the keys in [slurm]",
            "slurm.infer",
        )
    if not deployment.num_infer_nodes:
        raise BadKeysError(
            "slurm.infer describes nodes of the engines, and deployment.num_infer_nodes is 0: engines are on the "
            "trainer's nodes; set it, or omit slurm.infer",
            "slurm.infer",
        )


def check_sharing(deployment: Deployment, slurm: Slurm | None) -> None:
    """Raises BadKeysError where GPUs of a job would be shared, which its plan does not do."""
    if deployment.engine_share is not None and (slurm is not None or deployment.type == "slurm"):
        raise BadKeysError(
            "deployment.engine_share shares GPUs of this machine alone: on Slurm the trainer and each engine have GPUs "
            "of their own; omit it, and set deployment.gpus_per_node to as many as they need",
            "deployment.engine_share",
        )


def check_nodes(deployment: Deployment, slurm: Slurm | None, ray: Ray | None = None, *, is_sft: bool = False) -> None:
    """Raises BadKeysError where nodes are asked for, and all processes are on this machine. Other placements say
    themselves whether they have nodes (`launch/placement/registry.py`)."""
    if slurm is not None or on_ray(deployment, ray) is not None:
        return
    if is_sft and deployment.type == "slurm":
        raise BadKeysError(
            f"deployment.type is {deployment.type!r}, and `primerl sft` trains on this machine unless a section "
            "[slurm] submits it as a job, or [ray] starts it on a cluster; add one, or omit deployment.type",
            "deployment.type",
        )
    key = "num_train_nodes" if deployment.num_train_nodes > 1 else "num_infer_nodes"
    count = getattr(deployment, key)
    if deployment.type == "local" and (deployment.num_train_nodes > 1 or deployment.num_infer_nodes):
        also = "" if is_sft else ', set deployment.type = "slurm" within a job of your own'
        raise BadKeysError(
            f"deployment.{key} is {count}, and without Slurm or Ray all processes are on this machine; add a section "
            f"[slurm] or [ray]{also}, or omit it",
            f"deployment.{key}",
        )
