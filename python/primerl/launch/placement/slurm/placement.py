"""Placement within a Slurm job: each role is a step of the job, on the nodes that the plan gives it.

    launcher (on the job's first node) ── srun ── agent on node A ── guard ── process of the role
                                             └─── agent on node B ── guard ── ...

Processes that only accompany the run (monitors, uploads) run next to the launcher, as on one machine.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from primerl.launch.placement import alike
from primerl.launch.placement.local import unusable
from primerl.launch.placement.node_logs import log_files, note
from primerl.launch.placement.nodes import REPORT_S, NodesPlacement, chosen, set_apart
from primerl.launch.placement.protocol import Command, PlacementError, Plan, Process, Role
from primerl.launch.placement.slurm import agent, allocation, planning
from primerl.launch.placement.slurm.allocation import Allocation, Shape
from primerl.launch.placement.slurm.planning import Slot
from primerl.launch.placement.slurm.step import Step, command_line, environment_of_srun
from primerl.launch.slurm import jobs
from primerl.run_key import VARIABLE

TRIES, AGAIN_S = 5, 5.0
"""How often Slurm is asked for a step that it does not create, and how long after each refusal."""


@dataclass(slots=True)
class Asked:
    """What a step was asked to start."""

    role: Role
    command: Command
    process: Process
    tries: int = 1
    due: float = 0.0


class SlurmPlacement(NodesPlacement):
    """Outside of a job it only plans. Use as a context manager: leaving it leaves no process behind on any node.

    It sets no hosts: the job that `[slurm]` submits has those of its nodes (`launch/slurm/within.py`), and in a job of
    the user's own the config names them."""

    engines_need_nodes = True
    start_s = 90.0  # a step that Slurm does not create at first is asked for again

    def __init__(
        self,
        *,
        num_train_nodes: int = 1,
        num_infer_nodes: int = 0,
        gpus_per_node: int = 0,
        infer_gpus_per_node: int | None = None,
        ahead: bool = False,
    ) -> None:
        """`ahead`: for a job that is yet to be submitted, whatever job this process may be in."""
        super().__init__()
        self.say: Callable[[str], None] = lambda text: None
        """Gets what the user is to know of the nodes."""
        self._remarked: set[str] = set()
        self.shape = Shape(num_train_nodes, num_infer_nodes, gpus_per_node, infer_gpus_per_node)
        self._ahead = ahead
        self._slots: dict[str, Slot] = {}
        self._steps: dict[str, Step] = {}
        self._leaving: list[Step] = []  # ended, but for `srun` itself
        self._addresses: dict[str, str] = {}
        self._asked: dict[str, Asked] = {}
        self._again: dict[str, Asked] = {}  # to be tried again
        self._over = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def allocation(self) -> Allocation:
        """Raises PlacementError."""
        if self._ahead:
            return allocation.planned(self.shape)
        found = allocation.current()
        if found is None:
            raise PlacementError(
                'deployment.type: "slurm" starts processes on the nodes of a job, and this process is in none '
                "(SLURM_JOB_ID); add a section [slurm], which submits one, or start it by sbatch or salloc",
                "deployment.type",
            )
        return found

    def address(self, node: str) -> str:
        """By which other nodes reach it."""
        if node not in self._addresses:
            self._addresses = allocation.addresses(self.allocation.nodes)
        return self._addresses[node]

    def own_address(self) -> str:
        found = self.allocation
        return self.address(found.nodes[0]) if found.is_real else found.nodes[0]

    def has_other_nodes(self) -> bool:
        return len(self.allocation.nodes) > 1

    def is_launchers_own(self) -> bool:
        return self.shape.train_nodes == 1

    def prepare(self, folder: Path, say: Callable[[str], None], check: Callable[[], None]) -> None:
        self.say = say

    def _look_at_job(self) -> None:
        """After the loss of a step: without its job nothing can be started any more."""
        job = self.allocation.job
        found = jobs.state(jobs.Job(job, 0.0, 0))
        if found.state not in ("RUNNING", jobs.UNKNOWN, jobs.SILENT):
            self._lost = f"Slurm has ended job {job}: it is {found.told()}"

    def plan(self, roles: Sequence[Role]) -> Plan:
        found = self.allocation
        plan, self._slots = planning.placed(roles, found, self.shape)
        # An engine on another node says itself that its port is taken.
        own = [role for role in roles if self._slots[role.name].nodes == found.nodes[:1]]
        if found.is_real and (problems := unusable(own)):
            raise PlacementError.of(problems)
        return plan

    def _start(self, role: Role, command: Command, process: Process) -> None:
        self._begin(Asked(role, command, process))

    def _begin(self, asked: Asked) -> None:
        role, command, process = asked.role, asked.command, asked.process
        slot = self._slots[role.name]
        logs = log_files(command.log, role.name, slot.nodes)
        witness = command.log.parent / f".{role.name}.{secrets.token_hex(8)}"
        text = secrets.token_hex(16)
        witness.write_text(text, encoding="utf-8")
        found = self.allocation
        srun = command_line(role.name, slot.nodes, found.job, found.groups.get(slot.nodes[0]))
        try:
            step = Step(process, slot.nodes, srun, environment_of_srun(os.environ, frozenset({VARIABLE})))
        except OSError as error:
            process.failure = f"srun: {error}"
            self._ended.append(process)
            witness.unlink()
            return
        process.node = self.address(slot.nodes[0])
        self._steps[role.name] = step
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, name="agents", daemon=True)
            self._heart.start()
        self._asked[role.name] = asked
        step.witness = witness
        step.send(
            {
                "start": role.name,
                "command": list(command.argv),
                "environment": self._environment(role, slot, command),
                "logs": [os.fspath(log) for log in logs],
                "hide": list(command.hide),
                "gpus": list(slot.gpus),
                "witness": [os.fspath(witness), text],
                "versions": alike.versions(),
            }
        )

    def _beat(self) -> None:
        """Tells all agents that this process is there, also while Slurm lets its main thread wait."""
        while not self._over.wait(agent.ALIVE_S):
            for step in list(self._steps.values()):
                step.send({"alive": True})

    def _is_tried_again(self, step: Step) -> bool:
        """Whether a step that Slurm has not created is asked for again, some time later: a node that has just come
        back, say, takes none at first."""
        name = step.process.name
        asked = self._asked[name]
        if not step.is_lost or step.step is not None or step.was_in_vain:
            return False
        if self._stopped or self._lost or asked.tries >= TRIES:
            return False
        step.process.failure = None
        asked.tries += 1
        asked.due = time.monotonic() + AGAIN_S
        self._again[name] = asked
        return True

    def _environment(self, role: Role, slot: Slot, command: Command) -> dict[str, str]:
        """What differs from this process's own, which `srun` passes on."""
        own = {
            name: value
            for name, value in command.environment.items()
            if name in command.own or name == VARIABLE or os.environ.get(name) != value
        }
        set_apart(own, role, command, len(slot.nodes), lambda: (self.address(slot.nodes[0]), free_port()))
        return own

    def watch(self, timeout_s: float) -> list[Process]:
        self._wait(timeout_s, [one for step in self._steps.values() for one in step.descriptors()])
        ended, self._ended = self._ended, []
        ended += self._local.watch(0.0)
        now = time.monotonic()
        for name in [name for name, asked in self._again.items() if now >= asked.due]:
            self._begin(self._again.pop(name))
        for name, step in list(self._steps.items()):
            step.look(now)
            self._note(step)
            self._remark(step)
            if step.witness is not None and (step.process.ended or step.is_started):
                step.witness.unlink(missing_ok=True)
                step.witness = None
            if step.process.ended:
                del self._steps[name]
                if step.is_lost and not self._stopped:
                    self._look_at_job()
                step.close()
                self._leaving.append(step)
                if not self._is_tried_again(step):
                    ended.append(step.process)
        self._leaving = [step for step in self._leaving if not step.release()]
        return ended

    def _remark(self, step: Step) -> None:
        """Once for each node."""
        remarks, step.remarks = step.remarks, []
        for node, remark in remarks:
            if node not in self._remarked:
                self._remarked.add(node)
                self.say(remark)

    def _note(self, step: Step) -> None:
        """In the log of each of its nodes."""
        said = step.said()
        if not said:
            return
        nodes = self.allocation.nodes
        for node in step.tasks:
            note(step.process.log, nodes.index(node), step.process.name, said)

    def _tell(self, name: str, message: Mapping[str, object]) -> None:
        if name in self._steps:
            self._steps[name].send(message)

    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None:
        for name in chosen(self._again, names):
            self._again.pop(name).process.failure = "it was stopped before Slurm had created its step"
        steps = [self._steps[name] for name in chosen(self._steps, names)]
        for step in steps:
            step.send({"stop": grace_s})
        self._stop_here(grace_s, names)
        deadline = time.monotonic() + grace_s + REPORT_S

        def have_ended() -> bool:
            return all(step.process.ended for step in steps)

        self._watch_ends(deadline, have_ended)
        for step in steps:
            if not step.process.ended:
                step.kill()
        self._watch_ends(deadline + REPORT_S, have_ended)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(grace_s=0.0 if kind is not None else REPORT_S)
            deadline = time.monotonic() + REPORT_S
            while self._leaving and time.monotonic() < deadline:
                self.watch(0.05)
            for step in [*self._steps.values(), *self._leaving]:
                step.kill()
                step.srun.wait()
                step.release()
        finally:
            self._over.set()
            self._local.__exit__(kind, error, trace)


def free_port() -> int:
    """On this node, which is the first of those that the trainer's ranks are on."""
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])
