"""The nodes of a Slurm job: those of this process's own, or those that a job would ask for."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from primerl.launch.placement.protocol import PlacementError
from primerl.launch.placement.slurm import hostlist

ASK_S = 30.0
ADDRESS = re.compile(r"\bNodeName=(\S+).*?\bNodeAddr=(\S+)")
JOB = "SLURM_JOB_ID"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run asks of Slurm."""

    train_nodes: int = 1
    infer_nodes: int = 0
    """0: the engines are on the trainer's nodes."""
    gpus_per_node: int = 0
    infer_gpus_per_node: int | None = None
    """On the nodes of the engines; None: as many."""

    def gpus_of(self, index: int) -> int:
        """On the node of that number in the job."""
        if index < self.train_nodes or self.infer_gpus_per_node is None:
            return self.gpus_per_node
        return self.infer_gpus_per_node

    @property
    def engine_gpus(self) -> int:
        """On each of the nodes that engines are on."""
        return self.gpus_of(self.train_nodes if self.infer_nodes else 0)

    @property
    def nodes(self) -> int:
        return self.train_nodes + self.infer_nodes


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of one job."""

    job: str
    """Its id; empty where there is none yet."""
    nodes: tuple[str, ...]
    groups: Mapping[str, int] = field(default_factory=dict)
    """The component of a heterogeneous job that each node is of; empty for other jobs."""

    @property
    def is_real(self) -> bool:
        return self.job != ""


def planned(shape: Shape) -> Allocation:
    """Before there is a job: nodes by their numbers."""
    return Allocation("", tuple(f"node_{index}" for index in range(shape.nodes)))


def current(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """That of the job which this process is in, with the node that it runs on first; None where it is in none.
    Raises PlacementError for one whose nodes are not known."""
    job = environ.get(JOB, "")
    if not job:
        return None
    size = environ.get("SLURM_HET_SIZE", "")
    groups = range(int(size)) if size.isdigit() else range(0)
    given = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in groups]
    given = given or [environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""]
    try:
        lists = [hostlist.expanded(text) for text in given]
    except ValueError as error:
        raise PlacementError.at(
            "deployment", f"the nodes of Slurm job {job} are not known (SLURM_NODELIST): {error}"
        ) from None
    nodes = [node for names in lists for node in names]
    own = environ.get("SLURMD_NODENAME")
    if own in nodes:
        nodes.remove(own)
        nodes.insert(0, own)
    return Allocation(job, tuple(nodes), {node: group for group in groups for node in lists[group]})


def addresses(nodes: tuple[str, ...]) -> dict[str, str]:
    """By which the nodes reach each other: what Slurm itself uses, which is the node's name unless its admin has set
    another. A node that Slurm does not describe is reached by its name."""
    found = dict.fromkeys(nodes)
    try:
        command = ["scontrol", "show", "node", "-o", ",".join(nodes)]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=ASK_S, check=False
        )
        found.update(pair for pair in ADDRESS.findall(done.stdout) if pair[0] in found)
    except (OSError, subprocess.TimeoutExpired):
        pass
    return {name: address or name for name, address in found.items()}
