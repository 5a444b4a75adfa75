"""What placements on several nodes share: the launcher's own node is a placement within theirs."""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from primerl.forking import servers
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Command, Machines, Process, Role
from primerl.train.distributed.torchrun import RENDEZVOUS, rendezvous

REPORT_S = 10.0
"""On top of the grace period: for the other nodes to report."""


class NodesPlacement(Machines, ABC):
    """Roles without a slot (what only accompanies the run) run next to the launcher, as on one machine."""

    _slots: Mapping[str, object]
    """By role: its nodes and what it gets there."""

    def __init__(self) -> None:
        self.by_name: dict[str, Process] = {}
        self._local = LocalPlacement()
        self._ended: list[Process] = []  # not yet reported by `watch`
        self._stopped = False
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        return self._local.lost or self._lost

    def start(self, role: Role, command: Command) -> Process:
        if role.name not in self._slots:
            process = self.by_name[role.name] = self._local.start(role, command)
            return process
        process = self.by_name[role.name] = Process.begun(role.name, command.log)
        if self._stopped:
            process.failure = "the run is being stopped"
            self._ended.append(process)
        else:
            self._start(role, command, process)
        return process

    def signal(self, name: str, number: int) -> None:
        if name in self._slots:
            self._tell(name, {"signal": int(number)})
        elif name in self._local.by_name:
            self._local.signal(name, number)

    def logs(self, name: str) -> Path:
        return self.by_name[name].log

    @abstractmethod
    def watch(self, timeout_s: float) -> list[Process]: ...

    @abstractmethod
    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None: ...

    def __enter__(self) -> Self:
        self._local.__enter__()
        return self

    @abstractmethod
    def _start(self, role: Role, command: Command, process: Process) -> None:
        """Starts a role in its slot, now or later."""

    @abstractmethod
    def _tell(self, name: str, message: Mapping[str, object]) -> None:
        """Sends a message to the agents of a role that has a slot; does nothing once it has ended."""

    def _wait(self, timeout_s: float, descriptors: Iterable[int]) -> None:
        """For news of other nodes, which come by these descriptors, or of what runs here."""
        if self._ended:
            return
        poller = select.poll()
        for descriptor in (*descriptors, *self._local.descriptors()):
            poller.register(descriptor, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def _stop_here(self, grace_s: float, names: Sequence[str]) -> None:
        """What runs next to the launcher, all of it or the named ones. Nothing can be started after a stop of all."""
        self._stopped = self._stopped or not names
        here = chosen(self._local.by_name, names)
        if here or not names:
            self._local.stop(grace_s=grace_s, names=names and here)

    def _watch_ends(self, deadline: float, over: Callable[[], bool]) -> None:
        """Until it is over. Ends that were asked for are no news."""
        while time.monotonic() < deadline and not over():
            self.watch(max(0.0, min(0.5, deadline - time.monotonic())))


def chosen(known: Iterable[str], names: Collection[str]) -> list[str]:
    """Those of the names that are known; all of them where none is named."""
    return [name for name in known if not names or name in names]


def set_apart(
    environment: dict[str, str], role: Role, command: Command, nodes: int, address: Callable[[], tuple[str, int]]
) -> None:
    """Adds what a process needs that is not on the launcher's node. `address`: where the ranks of a role on several
    nodes meet."""
    # Fork servers are on the launcher's node, and a process elsewhere would wait for them.
    environment[servers.VARIABLE] = servers.OFF
    if nodes > 1:
        folder = command.log.parent / role.name / "torchrun"
        environment[RENDEZVOUS] = rendezvous(nodes, role.ranks, *address(), folder)
