"""Placements as another package would bring them: plain processes, and a record of what they were asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from primerl.launch.placement.protocol import Command, Machines, Place, PlacementError, Plan, Process, Role

TICK_S = 0.02


class Plain:
    """It hides no secrets in logs, and leaves processes behind where the launcher is killed."""

    def __init__(self, record: str) -> None:
        self.record = Path(record)
        self.by_name: dict[str, Process] = {}
        self.lost: str | None = None
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def plan(self, roles: Sequence[Role]) -> Plan:
        self._note(plan=[[role.name, role.kind, role.resources.gpus, role.resources.cpus] for role in roles])
        return Plan(tuple(Place(role, "a plain process") for role in roles))

    def start(self, role: Role, command: Command) -> Process:
        self._note(start=role.name, own=sorted(command.own))
        process = self.by_name[role.name] = Process(role.name, command.log)
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            started = subprocess.Popen(command.argv, env=command.environment, start_new_session=True, **streams)
        self._started[role.name] = started
        process.pid = started.pid
        return process

    def watch(self, timeout_s: float) -> list[Process]:
        deadline = time.monotonic() + timeout_s
        while True:
            ended = []
            for name, process in self.by_name.items():
                if process.code is None and (code := self._started[name].poll()) is not None:
                    process.code = code
                    ended.append(process)
            if ended or time.monotonic() >= deadline:
                return ended
            time.sleep(TICK_S)

    def signal(self, name: str, number: int) -> None:
        if self.by_name[name].code is None:
            os.killpg(self._started[name].pid, number)

    def logs(self, name: str) -> Path:
        return self.by_name[name].log

    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None:
        self._note(stop=list(names))
        wanted = [process for name, process in self.by_name.items() if not names or name in names]
        deadline = time.monotonic() + grace_s
        for process in wanted:
            self.signal(process.name, signal.SIGTERM)
        while any(process.code is None for process in wanted):
            self.watch(TICK_S)
            if time.monotonic() > deadline:
                for process in wanted:
                    self.signal(process.name, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(grace_s=0.0)

    def _note(self, **what: Any) -> None:
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


class TwoNodes(Plain, Machines):
    """Two nodes, both of which are this machine: the launcher's, and one of the engines."""

    sets_hosts = True

    def __init__(self, record: str, *, num_train_nodes: int, num_infer_nodes: int) -> None:
        super().__init__(record)
        self.nodes = [f"node_{index}" for index in range(num_train_nodes + num_infer_nodes)]
        self._note(nodes=[num_train_nodes, num_infer_nodes])

    def plan(self, roles: Sequence[Role]) -> Plan:
        if len(self.nodes) > 2:
            raise PlacementError(f"deployment: {len(self.nodes)} nodes are asked for, and there are two")
        super().plan(roles)
        self._note(listens=[one.host for role in roles for one in role.listens])
        return Plan(tuple(Place(role, self.nodes[-1 if role.kind == "inference" else 0]) for role in roles))

    def start(self, role: Role, command: Command) -> Process:
        process = super().start(role, command)
        process.node = self.own_address()
        return process

    def own_address(self) -> str:
        return "localhost"

    def has_other_nodes(self) -> bool:
        return len(self.nodes) > 1

    def prepare(self, folder: Path, say: Callable[[str], None], check: Callable[[], None]) -> None:
        check()
        say(f"two nodes are reserved for {folder.name}")
