"""Placement on this machine: every role is a process under one guard, with GPUs of its own where there are enough."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from primerl.forking import servers
from primerl.launch.placement import assignment, gpus
from primerl.launch.placement.gpus import Gpu
from primerl.launch.placement.protocol import Command, Listener, Machines, PlacementError, Plan, Process, Role
from primerl.launch.supervise.processes import Processes
from primerl.process.problems import Problem

HOST = "this machine"


class LocalPlacement(Machines):
    """Use as a context manager: leaving it leaves no process behind."""

    def __init__(self, *, find_gpus: Callable[[], Sequence[Gpu]] = gpus.visible) -> None:
        self.by_name: dict[str, Process] = {}
        self._find_gpus = find_gpus
        self._found: Sequence[Gpu] = ()
        self._gpus: dict[str, tuple[str, ...]] = {}  # by role
        self._guarded: Processes | None = None

    @property
    def lost(self) -> str | None:
        end = self._processes.guard_end
        return None if end is None else f"the guard of the processes {end}"

    def plan(self, roles: Sequence[Role]) -> Plan:
        self._found = self._find_gpus() if any(role.resources.gpus for role in roles) else []
        places = assignment.places(roles, self._found, HOST)
        plan = Plan(tuple(places))
        self._gpus = {place.role.name: place.gpus for place in places}
        problems = unusable(roles)
        refused = assignment.refusal(places, self._found)
        problems += [] if refused is None else [refused.worded(f"{refused}. The plan:\n{plan.table()}")]
        if problems:
            raise PlacementError.of(problems)
        return plan

    def is_launchers_own(self) -> bool:
        return True

    def gpu_memory(self) -> dict[str, int]:
        return {one.name: one.memory for one in self._found if one.memory is not None}

    def start(self, role: Role, command: Command) -> Process:
        environment = dict(command.environment)
        if self._gpus.get(role.name):
            environment[gpus.VARIABLE] = ",".join(self._gpus[role.name])
            if gpus.VARIABLE not in command.environment:
                environment.setdefault(gpus.ORDER, gpus.BY_BUS)
        return self._processes.start(
            role.name,
            command.argv,
            log=command.log,
            environment=environment,
            hide=command.hide,
            fork=servers.address(command.preload),
        )

    def watch(self, timeout_s: float) -> list[Process]:
        return self._processes.poll(timeout_s)

    def descriptors(self) -> list[int]:
        """To be waited on, by a placement that has this one within it; none once its guard is lost."""
        return [] if self._processes.guard_end is not None else [self._processes.fileno()]

    def signal(self, name: str, number: int) -> None:
        self._processes.signal(name, number)

    def logs(self, name: str) -> Path:
        return self.by_name[name].log

    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None:
        self._processes.stop(grace_s=grace_s, names=names)

    def __enter__(self) -> Self:
        self._guarded = Processes(self.by_name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.__exit__(kind, error, trace)

    @property
    def _processes(self) -> Processes:
        if self._guarded is None:
            raise RuntimeError("nothing can be started before the placement is entered (`with placement:`)")
        return self._guarded


def unusable(roles: Iterable[Role]) -> list[Problem]:
    """Why roles cannot listen where they are to on this machine: a line for each address."""
    listeners = dict.fromkeys(one for role in roles for one in role.listens)
    return [problem for one in listeners if (problem := _unusable(one)) is not None]


def _unusable(listener: Listener) -> Problem | None:
    """Why this machine cannot listen there, with the key and what to do; None where it can."""
    key, host, port = listener.key, listener.host, listener.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # a part of the name is empty or longer than 63 characters
        return Problem.at(f"{key}.host", f"{host!r} is no address of this machine: {error}; use 127.0.0.1")
    with socket.socket(family, kind, protocol) as opened:
        # As servers do: a port whose last owner has just closed is free.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Problem.at(f"{key}.port", f"port {port} is in use; choose another, or 0 for any free one")
            return Problem.at(f"{key}.port", f"cannot listen on {host}:{port}: {error}; choose another")
    return None
