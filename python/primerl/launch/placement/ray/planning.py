"""Which role goes to which node of a Ray cluster, and which resources are reserved there. Pure: nothing is asked.

trainer        num_train_nodes nodes with an equal part of the ranks each, the launcher's own first where it can
engines        any node that has the GPUs, the fullest first; with num_infer_nodes, that many nodes without the trainer
env workers    wherever the most CPUs are free
orchestrator   next to the launcher, outside of Ray's resources, as everything that only accompanies the run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from primerl.launch.placement.protocol import Place, PlacementError, Plan, Role

PLACED = ("trainer", "sft", "inference", "env-worker")
"""Kinds of roles that Ray's nodes get."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    name: str
    address: str
    cpus: float
    """All that Ray may give there, or what of it is free."""
    gpus: float


@dataclass(frozen=True, slots=True)
class Shape:
    train_nodes: int = 1
    infer_nodes: int = 0
    """0: any node."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a role runs: on each of these nodes with as many CPUs, and the GPUs of these numbers among those that the
    run has reserved there."""

    nodes: tuple[str, ...]
    """Ids."""
    cpus: int
    gpus: tuple[tuple[int, ...], ...]
    """By node; empty where it needs none."""


@dataclass
class Room:
    """What is left of each node while roles are placed, and what has been given away."""

    nodes: dict[str, Node]
    taken: dict[str, Node] = field(default_factory=dict)

    def fits(self, node: str, cpus: int, gpus: int) -> bool:
        left = self.nodes[node]
        return left.cpus + ROUNDING >= cpus and left.gpus + ROUNDING >= gpus

    def take(self, node: str, cpus: int, gpus: int) -> tuple[int, ...]:
        """The numbers of the GPUs."""
        left = self.nodes[node]
        before = self.taken.get(node, replace(left, cpus=0, gpus=0))
        self.nodes[node] = replace(left, cpus=left.cpus - cpus, gpus=left.gpus - gpus)
        self.taken[node] = replace(before, cpus=before.cpus + cpus, gpus=before.gpus + gpus)
        return tuple(range(int(before.gpus), int(before.gpus) + gpus))


@dataclass(frozen=True, slots=True)
class Placed:
    plan: Plan
    slots: dict[str, Slot]
    bundles: dict[str, tuple[int, int]]
    """CPUs and GPUs that are reserved, by the node's id."""


def placed(
    roles: Sequence[Role], total: Sequence[Node], free: Sequence[Node], own: str, shape: Shape, address: str
) -> Placed:
    """In what is free, or else in what there is: the run waits for it then. `own`: id of the launcher's node.
    `address`: the cluster's, for messages. Raises PlacementError, with the plan, for what can never be placed."""
    if not total:
        raise PlacementError.at("ray.address", f"the Ray cluster at {address} has no node that is alive")
    if len(total) < shape.train_nodes + shape.infer_nodes:
        raise PlacementError.at(
            "deployment",
            f"{shape.train_nodes + shape.infer_nodes} nodes are asked for (num_train_nodes "
            f"{shape.train_nodes} + num_infer_nodes {shape.infer_nodes}), and the Ray cluster has {len(total)} "
            f"({', '.join(node.address for node in total)})",
        )
    has_gpus = any(node.gpus for node in total)
    found, missing = _tried(roles, free, own, shape, has_gpus)
    if not missing:
        return found
    found, missing = _tried(roles, total, own, shape, has_gpus)
    if not missing:
        noted = tuple(
            replace(place, note="waits for what others use") if place.role.name in found.slots else place
            for place in found.plan.places
        )
        return replace(found, plan=Plan(noted))
    nodes = "; ".join(f"{node.address}: {_amount(node.cpus, node.gpus)}" for node in total)
    raise PlacementError.at(
        "deployment",
        f"{missing[0]}; the cluster has {len(total)} node{'' if len(total) == 1 else 's'} ({nodes}). Lower "
        "trainer.ranks, inference.replicas, num_train_nodes or num_infer_nodes, or add nodes. The plan:\n"
        f"{found.plan.table()}",
    )


def again(role: Role, before: Slot, free: Sequence[Node]) -> Slot | None:
    """Other nodes for a role whose nodes were lost, with as much as it had; None where none has it."""
    needs = len(before.gpus[0]) if before.gpus else 0
    able = [node for node in free if node.cpus + ROUNDING >= before.cpus and node.gpus + ROUNDING >= needs]
    able.sort(key=lambda node: (node.gpus, -node.cpus))
    if len(able) < len(before.nodes):
        return None
    chosen = tuple(node.id for node in able[: len(before.nodes)])
    return Slot(chosen, before.cpus, tuple(tuple(range(needs)) for _ in chosen) if needs else ())


def _tried(
    roles: Sequence[Role], nodes: Sequence[Node], own: str, shape: Shape, has_gpus: bool
) -> tuple[Placed, list[str]]:
    """And what could not be placed, a clause each."""
    room = Room({node.id: node for node in nodes})
    slots: dict[str, Slot] = {}
    missing: list[str] = []
    engines = {role.name for role in roles if role.kind == "inference"}
    for kind in PLACED:
        for role in roles:
            if role.kind == kind:
                slot = _slot(role, room, slots, engines, own, shape, has_gpus)
                if isinstance(slot, str):
                    missing.append(slot)
                else:
                    slots[role.name] = slot
    shown = {node.id: node.address for node in nodes}
    places = []
    for role in roles:
        given = slots.get(role.name)
        if given is not None:
            gpus = tuple(map(str, given.gpus[0])) if given.gpus else ()
            places.append(Place(role, ", ".join(shown[node] for node in given.nodes), gpus))
        elif role.kind in PLACED:
            places.append(Place(role, "-", note="no node has what it needs"))
        else:
            places.append(Place(role, shown.get(own, "the launcher's node")))
    bundles = {id_: (int(one.cpus), int(one.gpus)) for id_, one in room.taken.items()}
    return Placed(Plan(tuple(places)), slots, bundles), missing


def _slot(
    role: Role, room: Room, slots: dict[str, Slot], engines: set[str], own: str, shape: Shape, has_gpus: bool
) -> Slot | str:
    """Or why there is none. `engines`: their names."""
    trains = role.kind in ("trainer", "sft")
    count = shape.train_nodes if trains else 1
    if role.ranks % count:
        raise PlacementError(
            f"trainer.ranks ({role.ranks}) is no multiple of deployment.num_train_nodes ({count}), and each node gets "
            "as many; change one of the two",
            "trainer.ranks",
            "deployment.num_train_nodes",
        )
    cpus = -(-role.resources.cpus // count)
    gpus = -(-role.resources.gpus // count) if has_gpus else 0
    allowed = _allowed(role, room, slots, engines, shape)
    able = [node for node in allowed if room.fits(node, cpus, gpus)]
    if trains:
        able.sort(key=lambda node: (gpus == 0 and node != own, room.nodes[node].gpus))
    else:
        able.sort(key=lambda node: (room.nodes[node].gpus if gpus else 0, -room.nodes[node].cpus))
    if len(able) < count:
        where = f"{count} nodes with {_amount(cpus, gpus)} each" if count > 1 else f"a node with {_amount(cpus, gpus)}"
        apart = " that has no part of the trainer" if role.kind == "inference" and shape.infer_nodes else ""
        return f"{role.name} needs {where}{apart}"
    chosen = tuple(able[:count])
    numbers = tuple(room.take(node, cpus, gpus) for node in chosen)
    return Slot(chosen, cpus, numbers if gpus else ())


def _allowed(role: Role, room: Room, slots: dict[str, Slot], names: set[str], shape: Shape) -> list[str]:
    named = role.resources.nodes
    nodes = [one.id for one in room.nodes.values() if named is None or named in (one.id, one.name, one.address)]
    if role.kind != "inference" or not shape.infer_nodes:
        return nodes
    training = {node for slot in (slots.get("trainer"),) if slot is not None for node in slot.nodes}
    engines = list(dict.fromkeys(n for name, one in slots.items() if name in names for n in one.nodes))
    if len(engines) < shape.infer_nodes:
        fresh = [node for node in nodes if node not in training and node not in engines]
        return fresh or engines
    return engines


def _amount(cpus: float, gpus: float) -> str:
    parts = [f"{gpus:g} GPU{'' if gpus == 1 else 's'}"] if gpus else []
    return ", ".join([*parts, f"{cpus:g} CPU{'' if cpus == 1 else 's'}"])
