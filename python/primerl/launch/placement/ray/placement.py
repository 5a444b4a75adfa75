"""Placement on a Ray cluster: the plan's nodes are reserved by one placement group, with an agent in each bundle.

    launcher (on a node of the cluster) ── driver ── Ray ── agent on node A ── keeper ── guard ── process of the role
                                                       └─── agent on node B ── keeper ── guard ── ...

The orchestrator, and what only accompanies the run (monitors, uploads), runs next to the launcher, as on one machine.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from primerl.config.schema.deployment import Ray
from primerl.launch.placement.local import unusable
from primerl.launch.placement.node_logs import log_files, note
from primerl.launch.placement.nodes import REPORT_S, NodesPlacement, chosen, set_apart
from primerl.launch.placement.protocol import Command, PlacementError, Plan, Process, Role
from primerl.launch.placement.ray import keeper, planning, reserving
from primerl.launch.placement.ray.connection import Connection
from primerl.launch.placement.ray.planning import Node, Placed, Shape, Slot
from primerl.launch.placement.ray.reserving import Seat
from primerl.launch.placement.ray.roles import Part, Started
from primerl.run_key import VARIABLE

UPLOADED = "/runtime_resources/working_dir_files/"
"""In the paths of folders that `ray job submit --working-dir` has uploaded."""
OTHERS_S = 8.0
"""How long the parts of a role on other nodes have to end by themselves after one of them has failed."""
LOOK_EVERY_S = 2.0
"""How often it is asked whether a node has what a lost role needs."""


@dataclass(slots=True)
class Waiting:
    """A role that is to go elsewhere."""

    role: Role
    command: Command
    process: Process
    until: float
    due: float = 0.0
    group: str | None = None
    """Which is being reserved for it."""
    why: str = ""
    """The last refusal."""


class RayPlacement(NodesPlacement):
    """Use as a context manager: leaving it leaves no process behind on any node, and gives back what was reserved."""

    sets_hosts = True

    def __init__(self, settings: Ray, *, num_train_nodes: int = 1, num_infer_nodes: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.shape = Shape(num_train_nodes, num_infer_nodes)
        self.seats: dict[str, Seat] = {}
        self._connection: Connection | None = None
        self._placed: Placed | None = None
        self._slots: dict[str, Slot] = {}
        self._seats_of: dict[str, tuple[str, ...]] = {}  # by role
        self._started: dict[str, Started] = {}
        self._parts: dict[str, tuple[Started, Part]] = {}  # by the part's key
        self._waiting: dict[str, Waiting] = {}
        self._banned: set[str] = set()  # ids of nodes that were lost

    @property
    def connection(self) -> Connection:
        """Made when it is first asked for. Raises PlacementError."""
        if self._connection is None:
            self._connection = Connection(self.settings.address, self.settings.namespace)
        return self._connection

    def own_address(self) -> str:
        own = self.connection.own
        return next((str(one["address"]) for one in self.connection.nodes if one["id"] == own), "127.0.0.1")

    def has_other_nodes(self) -> bool:
        return len(self.connection.nodes) > 1

    def own_node(self) -> str:
        return self.connection.own

    def check_folder(self, folder: Path) -> None:
        if UPLOADED in os.path.realpath(folder):
            raise PlacementError.at(
                "output_dir",
                f"{folder} is in the folder that was uploaded for this job (`ray job submit --working-dir`), which "
                "other nodes do not share, and which Ray deletes after the job; give an absolute output_dir that all "
                "nodes share",
            )

    def plan(self, roles: Sequence[Role]) -> Plan:
        nodes = self.connection.nodes
        total, free = nodes_of(nodes, "total"), nodes_of(nodes, "free")
        self._placed = planning.placed(roles, total, free, self.connection.own, self.shape, self.settings.address)
        self._slots = self._placed.slots
        # An engine on another node says itself that its port is taken.
        if problems := unusable(role for role in roles if role.name not in self._slots):
            raise PlacementError.of(problems)
        return self._placed.plan

    def prepare(self, folder: Path, say: Callable[[str], None], check: Callable[[], None]) -> None:
        """Reserves it, and compares the nodes with this one."""
        assert self._placed is not None
        seats = reserving.seats("0", self._placed.bundles, self.connection.nodes)
        self.seats = reserving.reserved(self.connection, seats, self.settings.wait_s, folder, say, check)
        at = {seat.node: name for name, seat in self.seats.items()}
        self._seats_of = {role: tuple(at[node] for node in slot.nodes) for role, slot in self._slots.items()}

    def own_gpus(self, name: str) -> tuple[str, ...]:
        slot = self._slots[name]
        own = self.seats[self._seats_of[name][0]].gpus
        return tuple(own[number] for number in slot.gpus[0]) if slot.gpus else ()

    def _start(self, role: Role, command: Command, process: Process) -> None:
        if all(self.seats[name].is_there for name in self._seats_of[role.name]):
            self._begin(role, command, process)
        else:
            until = time.monotonic() + self.settings.wait_s
            self._waiting[role.name] = Waiting(role, command, process, until)

    def _begin(self, role: Role, command: Command, process: Process) -> None:
        seats = [self.seats[name] for name in self._seats_of[role.name]]
        slot = self._slots[role.name]
        process.node = seats[0].address
        logs = log_files(command.log, role.name, [seat.name for seat in seats])
        environment = self._environment(role, command, seats)
        parts = [Part(f"{role.name}.{secrets.token_hex(4)}", seat.key, seat.address) for seat in seats]
        started = self._started[role.name] = Started(process, parts)
        for rank, (part, seat, log) in enumerate(zip(parts, seats, logs, strict=True)):
            self._parts[part.key] = (started, part)
            request = {
                "start": role.name,
                "command": list(command.argv),
                "environment": environment,
                "logs": [os.fspath(log)],
                "hide": list(command.hide),
                "gpus": [seat.gpus[number] for number in slot.gpus[rank]] if slot.gpus else [],
                "rank": rank,
            }
            self.connection.tell(begin=part.key, seat=seat.key, command=keeper_command(), request=request)

    def _environment(self, role: Role, command: Command, seats: Sequence[Seat]) -> dict[str, str]:
        """What is set on top of the node's own."""
        names = command.own | {VARIABLE} | set(self.settings.export)
        own = {name: value for name, value in command.environment.items() if name in names}
        first = seats[0]
        set_apart(own, role, command, len(seats), lambda: (first.address, self.connection.ask_port(first.key) or 0))
        return own

    def watch(self, timeout_s: float) -> list[Process]:
        self._wait(timeout_s, () if self.connection.is_gone else (self.connection.fileno(),))
        self._hear()
        now = time.monotonic()
        for waiting in list(self._waiting.values()):
            if now >= waiting.due:
                waiting.due = now + LOOK_EVERY_S
                self._place_again(waiting, now)
        ended, self._ended = self._ended, []
        return ended + self._local.watch(0.0)

    def _hear(self) -> None:
        for message in self.connection.poll(0.0):
            if "of" in message and message["of"] in self._parts:
                started, part = self._parts[message["of"]]
                self._settle(started, part, started.hear(part, message["line"]))
            elif "lost" in message:
                self._lose(self.seats[message["lost"]], message["why"], is_node=message["is_node"])
            elif "reserved" in message or "refused" in message:
                self._reserved_again(message)
        if self.connection.is_gone and self._lost is None:
            self._lost = f"the connection to the Ray cluster has ended: {self.connection.last_words()}"
            for started, part in list(self._parts.values()):
                self._settle(started, part, started.lose(part, self._lost))

    def _settle(self, started: Started, part: Part, said: str | None) -> None:
        """Notes what is known of a part."""
        process = started.process
        if said is not None:
            note(process.log, part.node, process.name, [said])
        if part.ended:
            self._parts.pop(part.key, None)
        if process.ended:
            if self._started.pop(process.name, None) is not None:
                self._ended.append(process)
        elif part is started.first_bad:
            # The other ranks wait for one that is gone.
            self._tell(process.name, {"stop": OTHERS_S})

    def _lose(self, seat: Seat, why: str, *, is_node: bool) -> None:
        seat.is_there = False
        if is_node:
            self._banned.add(seat.node)
        for started, part in list(self._parts.values()):
            if part.seat == seat.key:
                self._settle(started, part, started.lose(part, why))

    def _place_again(self, waiting: Waiting, now: float) -> None:
        """In the same bundle, in another one, or next to other roles where it needs no GPU."""
        role = waiting.role
        if waiting.group is not None:
            return None
        names = self._seats_of[role.name]
        if all(self.seats[name].is_there for name in names):
            del self._waiting[role.name]
            return self._begin(role, waiting.command, waiting.process)
        if now > waiting.until:
            return self._give_up(waiting)
        nodes = [one for one in self.connection.ask_nodes() if one["id"] not in self._banned]
        alive = {one["id"] for one in nodes}
        gone = [self.seats[name] for name in names if not self.seats[name].is_there]
        if all(seat.node in alive for seat in gone):
            for seat in gone:  # only its agent was lost
                waiting.group = seat.key
                self.connection.tell(reseat=seat.key, facts=reserving.facts_command(*seat.witness))
            return None
        slot = planning.again(role, self._slots[role.name], nodes_of(nodes, "free"))
        if slot is not None:
            return self._reserve_again(waiting, slot, nodes)
        there = sorted((s for s in self.seats.values() if s.is_there), key=lambda s: self._load(s.key))
        if not self._slots[role.name].gpus and len(there) >= len(names):
            self._seats_of[role.name] = tuple(seat.key for seat in there[: len(names)])
            return None
        return None

    def _give_up(self, waiting: Waiting) -> None:
        del self._waiting[waiting.role.name]
        why = f" ({waiting.why})" if waiting.why else ""
        waiting.process.failure = (
            f"its node was lost, and no other one has had what it needs for {self.settings.wait_s} s (ray.wait_s){why}"
            "; the same command resumes the run once there is one"
        )
        self._ended.append(waiting.process)

    def _reserve_again(self, waiting: Waiting, slot: Slot, nodes: Sequence[Mapping[str, object]]) -> None:
        gpus = len(slot.gpus[0]) if slot.gpus else 0
        group = waiting.group = secrets.token_hex(4)
        seats = reserving.seats(group, dict.fromkeys(slot.nodes, (slot.cpus, gpus)), nodes)
        witness = next(iter(self.seats.values())).witness
        for seat in seats.values():
            seat.is_there, seat.witness = False, witness
        self.seats |= seats
        self._slots[waiting.role.name] = slot
        self._seats_of[waiting.role.name] = tuple(seats)
        reserving.ask(self.connection, group, seats, self.settings.wait_s, witness)

    def _reserved_again(self, message: Mapping[str, object]) -> None:
        name = message.get("reserved") or message.get("refused")
        facts = message.get("facts")
        if isinstance(facts, dict):
            for key, fact in facts.items():
                self.seats[key].gpus, self.seats[key].is_there = tuple(fact["gpus"]), True
        for waiting in self._waiting.values():
            if waiting.group == name:
                waiting.group, waiting.why = None, str(message.get("why", ""))
                waiting.due = 0.0 if "reserved" in message else time.monotonic() + LOOK_EVERY_S

    def _load(self, seat: str) -> int:
        return sum(part.seat == seat for _, part in self._parts.values())

    def _tell(self, name: str, message: Mapping[str, object]) -> None:
        for part in self._started[name].parts if name in self._started else ():
            if not part.ended:
                self.connection.tell(send=part.key, seat=part.seat, message=message)

    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None:
        for name in chosen(self._waiting, names):
            self._waiting.pop(name).process.failure = "it was stopped before it had another node"
        stopped = [self._started[name] for name in chosen(self._started, names)]
        for started in stopped:
            self._tell(started.process.name, {"stop": grace_s})
        self._stop_here(grace_s, names)
        deadline = time.monotonic() + grace_s + REPORT_S
        self._watch_ends(deadline, lambda: self._lost is not None or all(one.process.ended for one in stopped))
        for started in stopped:
            for part in started.parts:
                self._settle(started, part, started.lose(part, "its keeper has not reported its end"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._connection is not None:
                self.stop(grace_s=0.0 if kind is not None else REPORT_S)
        finally:
            self.close()
            self._local.__exit__(kind, error, trace)

    def close(self) -> None:
        """Ends the connection, of one that only planned too."""
        if self._connection is not None:
            self._connection.end()
        for path in {seat.witness[0] for seat in self.seats.values()}:
            Path(path).unlink(missing_ok=True)


def keeper_command() -> list[str]:
    return [sys.executable, "-I", "-S", keeper.__file__, keeper.IN, os.getcwd()]


def nodes_of(found: Sequence[Mapping[str, object]], which: str) -> list[Node]:
    """What Ray says of its nodes; `which`: total or free."""
    nodes = []
    for one in found:
        amounts = one[which]
        assert isinstance(amounts, dict)
        nodes.append(Node(str(one["id"]), str(one["name"]), str(one["address"]), amounts["CPU"], amounts["GPU"]))
    return nodes
