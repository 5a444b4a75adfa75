"""The seam between a launcher and the machines: a launcher knows roles and their resources, a placement knows hosts.

    placement = chosen(config.deployment)      # `placement.registry`
    placement.plan(roles)                      # before anything starts: who would get what; raises PlacementError
    with placement:                            # takes what was planned, and gives everything back at the end
        placement.start(role, command)         # also again, after the process has ended
        for process in placement.watch(0.1):   # those that have ended
            ...
        placement.stop(grace_s=10.0)

What every placement has to provide beyond these methods:
- The run's output folder, the model and the Python environment are at the same paths wherever it starts a process.
- `process.pid` is the process id on its own machine: env workers register by it, and the orchestrator's file has it.
- The log at `command.log` is complete, on the launcher's machine, when `watch` reports the end of the process.
- No process outlives the launcher, however that ends.

A placement on several nodes also derives from `Machines`, and overrides what is different from one machine. Its class
gets `num_train_nodes`, `num_infer_nodes` and `gpus_per_node` of `[deployment]`, if it has parameters of these names.
Roles with several ranks that it divides among nodes are started on each of them, by the variables that
`nodes.set_apart` adds, and `PRIMERL_NODE_RANK`: which of the role's nodes it is, from 0.

Standard library only: the processes that check a run before its config is read use what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from primerl.forking.exit_status import described
from primerl.process.problems import ProblemError


class PlacementError(ProblemError):
    """The roles cannot be placed as they are. The message names what is missing, and shows the plan."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one role needs, of the machine (or machines) that it gets."""

    gpus: int = 0
    cpus: int = 1
    memory_mb: int | None = None
    """None where it is not known."""
    share: float | None = None
    """Part of the memory of its GPUs that it takes; None: all of it, so that no other role is there."""
    nodes: str | None = None
    """A constraint on the machines, in the words of the placement (such as a list of Slurm's node names)."""


@dataclass(frozen=True, slots=True)
class Listener:
    """An address that a role listens on; port 0 is any free one."""

    key: str
    """Section of the config that has it, for messages: `orchestrator`."""
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Role:
    """A process of the run, before it has a place."""

    name: str
    """Unique in the run: `trainer`, `inference_1`, `env_math_0`."""
    kind: str
    """The subcommand that it runs: orchestrator, trainer, inference, env-worker, monitor, store-worker, sft."""
    resources: Resources = Resources()
    ranks: int = 1
    """Equal parts that its resources consist of, which may be on several machines: a trainer's ranks."""
    listens: tuple[Listener, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """How a role is started."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    """All its variables, where it starts on the launcher's machine."""
    log: Path
    """Output is appended to it, without the texts to `hide`."""
    own: frozenset[str] = frozenset()
    """Names of the variables that are set for it; the others are the launcher's own. A machine that has an environment
    of its own needs only these."""
    hide: Sequence[str] = field(default=(), repr=False)
    preload: str | None = None
    """The kind of fork server that has imported what it needs: a hint, for placements that have one."""


@dataclass(frozen=True, slots=True)
class Place:
    """What one role gets."""

    role: Role
    host: str
    gpus: tuple[str, ...] = ()
    """GPUs, by the names that CUDA_VISIBLE_DEVICES takes; empty where it asked for none, or sees all of them."""
    note: str = ""
    """What there is to say of it, such as that GPUs are shared, or missing."""


@dataclass(frozen=True, slots=True)
class Plan:
    places: tuple[Place, ...] = ()

    def table(self) -> str:
        """One line a role."""
        rows = [(one.role.name, one.host, _asked(one.role), _given(one)) for one in self.places]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        padded = [[*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]] for row in rows]
        return "\n".join(f"  {'  '.join(row)}".rstrip() for row in padded)


def _asked(role: Role) -> str:
    asked = role.resources
    parts = [f"{asked.gpus} GPU{'' if asked.gpus == 1 else 's'}"] if asked.gpus else []
    parts.append(f"{asked.cpus} CPU{'' if asked.cpus == 1 else 's'}")
    parts += [] if asked.memory_mb is None else [f"{asked.memory_mb} MB"]
    parts += [] if asked.nodes is None else [f"nodes {asked.nodes}"]
    return ", ".join(parts)


def _given(place: Place) -> str:
    gpus = f"GPU {', '.join(place.gpus)}" if place.gpus else ""
    return "; ".join(filter(None, [gpus, place.note]))


@dataclass(slots=True)
class Process:
    """A role that was started, as its launcher sees it."""

    name: str
    log: Path
    pid: int | None = None
    """On its own machine; None until it runs."""
    code: int | None = None
    """Exit code; below 0 the number of the signal that ended it, or `NOT_KNOWN`."""
    node: str | None = None
    """Address of its machine, as other machines reach it; None where it is the launcher's, or not known."""
    cpu_s: float = 0.0
    """CPU seconds, known when it has ended; 0 where the placement cannot tell."""
    failure: str | None = None
    """Why it could not be started."""
    lost: str | None = None
    """How it was lost, of one whose end could not be seen: a predicate. Its code is `NOT_KNOWN` then."""
    log_from: int = 0
    """Bytes of the log that were written before it: the log is appended to."""

    @classmethod
    def begun(cls, name: str, log: Path) -> Process:
        """One that is about to be started."""
        return cls(name, log, log_from=log.stat().st_size if log.is_file() else 0)

    @property
    def ended(self) -> bool:
        return self.code is not None or self.failure is not None

    def describe_end(self) -> str:
        if self.failure is not None:
            return f"could not be started: {self.failure}"
        if self.lost is not None:
            return self.lost
        return "runs" if self.code is None else described(self.code)


class Placement(Protocol):
    """Starts, watches and stops processes. Made from the arguments in `[deployment] args`; used by one thread, and
    entered once, after `plan`."""

    @property
    def by_name(self) -> Mapping[str, Process]:
        """The newest process of each role that was started."""

    @property
    def lost(self) -> str | None:
        """How the placement itself failed (a guard that was killed, an allocation that ended); None while it works.
        All processes have ended by then, and nothing can be started any more."""

    def plan(self, roles: Sequence[Role]) -> Plan:
        """Where each role would go. Starts nothing, and may be called again. Raises PlacementError."""

    def start(self, role: Role, command: Command) -> Process:
        """Returns at once: `watch` reports a process that could not be started as ended. A role that was not planned
        (a process that only accompanies the run) goes wherever the launcher runs."""

    def watch(self, timeout_s: float) -> list[Process]:
        """Waits up to that long for news; returns the processes that have ended since the last call."""

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to all processes of a role. Does nothing for one that has ended."""

    def logs(self, name: str) -> Path:
        """The log of a role on the launcher's machine, brought up to date."""

    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None:
        """SIGTERM to all (or the named ones), SIGKILL after the grace period; returns when they have ended. After a
        stop of all, nothing can be started."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Machines:
    """What launchers ask about the machines of a placement. The answers here are those of one machine, and of any
    placement that does not derive from this class."""

    engines_need_nodes = False
    """Whether engines without a trainer have to ask for a node (`num_infer_nodes`), and may not be on any."""
    sets_hosts = False
    """Whether servers of the run, where the config does not say where they listen, do so where other nodes reach them,
    with a key that is made for the run."""
    start_s: float | None = None
    """How long a process may take to start, in seconds; None: as on one machine."""

    def own_address(self) -> str:
        """By which processes of the placement reach the launcher's machine. Raises PlacementError."""
        return "127.0.0.1"

    def has_other_nodes(self) -> bool:
        """Whether a process may be on another machine than the launcher's. Raises PlacementError."""
        return False

    def is_launchers_own(self) -> bool:
        """Whether ranks would be where the launcher is, so that a fine-tuning may be its own process."""
        return False

    def own_node(self) -> str | None:
        """The launcher's machine, for a role that is the launcher itself, as `Resources.nodes` has it; None where the
        first role of a plan is there anyway."""
        return None

    def own_gpus(self, name: str) -> Sequence[str] | None:
        """GPUs that a role has which is the launcher itself, by the names that CUDA_VISIBLE_DEVICES takes; None: all
        that the launcher sees."""
        return None

    def gpu_memory(self) -> Mapping[str, int]:
        """Bytes of each GPU of the last plan, as far as they are known."""
        return {}

    def check_folder(self, folder: Path) -> None:
        """Raises PlacementError for an output folder that the machines do not share."""

    def prepare(self, folder: Path, say: Callable[[str], None], check: Callable[[], None]) -> None:
        """Takes what was planned, before anything starts; called once, after the placement was entered.

        Args:
            folder: The run's output folder.
            say: Gets what the user is to know, also later.
            check: Called while this waits; raises what ends the launch.

        Raises:
            PlacementError: It cannot be had.
        """


ONE_MACHINE = Machines()


def machines(placement: Placement) -> Machines:
    return placement if isinstance(placement, Machines) else ONE_MACHINE
