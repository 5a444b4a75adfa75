"""Which role goes to which nodes of a job, with which of their GPUs. Pure: nothing is asked, nothing is started.

node_0 .. node_T-1     the trainer's ranks, in equal parts
node_T .. node_T+I-1   the engines, in order, each on one node (with I = 0: behind the ranks on the trainer's nodes)
node_0                 the orchestrator, where the launcher runs
all                    env workers, one after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from primerl.launch.placement.protocol import Place, PlacementError, Plan, Role
from primerl.launch.placement.slurm import hostlist
from primerl.launch.placement.slurm.allocation import Allocation, Shape
from primerl.process.problems import Problem

MISSING = "not enough GPUs are left"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a role runs: on each of its nodes with the GPUs of these numbers, of those that the job has there."""

    nodes: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    """Empty where it asked for none, or the job has none."""


@dataclass
class _Nodes:
    """GPUs that are free, by node."""

    free: dict[str, list[int]]
    problems: list[Problem] = field(default_factory=list)

    def take(self, nodes: Sequence[str], count: int) -> tuple[int, ...] | None:
        """The same numbers on each of the nodes; None where one of them lacks them."""
        common = [number for number in self.free[nodes[0]] if all(number in self.free[node] for node in nodes)]
        if len(common) < count:
            return None
        taken = tuple(common[:count])
        for node in nodes:
            self.free[node] = [number for number in self.free[node] if number not in taken]
        return taken


def placed(roles: Sequence[Role], allocation: Allocation, shape: Shape) -> tuple[Plan, dict[str, Slot]]:
    """The plan, and by role its slot. Raises PlacementError, with the plan, for what cannot be placed."""
    if len(allocation.nodes) < shape.nodes:
        raise PlacementError.at(
            "deployment",
            f"{shape.nodes} nodes are asked for (num_train_nodes {shape.train_nodes} + num_infer_nodes "
            f"{shape.infer_nodes}), and the Slurm job {allocation.job} has {len(allocation.nodes)}",
        )
    state = _Nodes({node: list(range(shape.gpus_of(at))) for at, node in enumerate(allocation.nodes)})
    places: list[Place] = []
    slots: dict[str, Slot] = {}
    workers = 0
    for role in roles:
        if role.kind == "env-worker":
            wanted: tuple[str, ...] = (allocation.nodes[workers % len(allocation.nodes)],)
            workers += 1
        else:
            wanted = _nodes_of(role, allocation, shape, state)
        slot, note = _slot(role, wanted, allocation, shape, state)
        slots[role.name] = slot
        places.append(Place(role, ", ".join(slot.nodes), tuple(map(str, slot.gpus)), note))
    plan = Plan(tuple(places))
    missing = [place.role.name for place in places if place.note == MISSING]
    if missing:
        words = (
            f"{', '.join(missing)} would have no GPUs: {shape.gpus_per_node} on each of {shape.nodes} nodes"
            " (gpus_per_node, num_train_nodes, num_infer_nodes) are too few; raise them, or lower trainer.ranks or "
            "inference.replicas"
        )
        state.problems.append(Problem.at("deployment", words))
    if state.problems:
        raise PlacementError.of([*state.problems, f"The plan:\n{plan.table()}"])
    return plan, slots


def _nodes_of(role: Role, allocation: Allocation, shape: Shape, state: _Nodes) -> tuple[str, ...]:
    train = allocation.nodes[: shape.train_nodes]
    if role.kind in ("trainer", "sft"):
        if role.ranks % len(train):
            words = (
                f"trainer.ranks ({role.ranks}) is no multiple of deployment.num_train_nodes ({len(train)}), and each "
                "node gets as many; change one of the two"
            )
            state.problems.append(Problem(words, "trainer.ranks", "deployment.num_train_nodes"))
        return train
    if role.kind == "inference":
        own = allocation.nodes[shape.train_nodes : shape.nodes] or train
        needed = role.resources.gpus
        if needed > shape.engine_gpus > 0:
            key = "deployment" if shape.infer_gpus_per_node is None else "slurm.infer"
            words = (
                f"{role.name} needs {needed} GPUs, more than {key}.gpus_per_node ({shape.engine_gpus}); an "
                "engine runs on one node, so lower its tensor-parallel-size"
            )
            state.problems.append(Problem(words, f"{key}.gpus_per_node"))
        # The one with the most that are free: without GPUs, in turn.
        index = int(role.name.rpartition("_")[2]) if role.name[-1].isdigit() else 0
        turn = [*own[index % len(own) :], *own[: index % len(own)]]
        return (max(turn, key=lambda node: len(state.free[node])),) if shape.engine_gpus else (turn[0],)
    return allocation.nodes[:1]


def _slot(role: Role, wanted: tuple[str, ...], allocation: Allocation, shape: Shape, state: _Nodes) -> tuple[Slot, str]:
    named = role.resources.nodes
    if named is not None:
        try:
            chosen = tuple(hostlist.expanded(named))
        except ValueError as error:
            state.problems.append(Problem(f"{role.name}: {error}"))
            chosen = wanted
        if allocation.is_real and (absent := [node for node in chosen if node not in allocation.nodes]):
            words = f"{role.name} is to run on {', '.join(absent)}, which the job does not have"
            state.problems.append(Problem(words))
        elif allocation.is_real:
            wanted = chosen
    count = role.resources.gpus
    gpus = shape.engine_gpus if role.kind == "inference" else shape.gpus_per_node
    if not count or not gpus:
        return Slot(wanted), ""
    each = -(-count // len(wanted))
    taken = state.take(wanted, each)
    return (Slot(wanted), MISSING) if taken is None else (Slot(wanted, taken), "")
