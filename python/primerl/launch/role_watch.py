"""Runs roles that no orchestrator looks after: the ranks of a fine-tuning, engines that only serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from primerl.launch import cluster
from primerl.launch.placement.protocol import Command, Placement, Process, Role
from primerl.launch.report.logs import cause_of
from primerl.launch.slurm import within
from primerl.launch.supervise.failures import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    RefusedError,
    RunFailedError,
    check_placement,
    failure_of,
)
from primerl.launch.supervise.watching import TICK_S, Interrupted, Interrupts, Restarts, gave_up


class RoleWatch:
    """Starts roles on a placement, which has planned them, and watches them until all have ended."""

    def __init__(
        self,
        placement: Placement,
        folder: Path,
        say: Callable[[str], None],
        *,
        restarts: int = 0,
        also: Callable[[], None] | None = None,
    ) -> None:
        """`folder`: which all nodes have to share. `restarts`: of each role that was killed. `also`: raises Interrupted
        for a reason of its own."""
        self.placement = placement
        self.folder = folder
        self.say = say
        self._restarts = Restarts(restarts)
        self._interrupts = Interrupts(also=also)
        self._commands: dict[str, tuple[Role, Command]] = {}
        self._running: set[str] = set()

    def run(self, commands: Sequence[tuple[Role, Command]], *, grace_s: float) -> int:
        """Returns the exit code: 0 where all roles have ended with 0, else that of the first that has not, by 128 and
        its number where a signal has killed it. `grace_s`: for the others to end by themselves then."""
        self._commands = {role.name: (role, command) for role, command in commands}
        with self.placement, self._interrupts:
            try:
                cluster.prepare(self.placement, self.folder, self.say, self._interrupts.check)
                for name in self._commands:
                    self._start(name)
                return self._watch()
            except RefusedError as error:
                self.say(str(error))
                return BAD_INPUT
            except RunFailedError as error:
                self.say(str(error))
                return self._code()
            except Interrupted as reason:
                time_is_up = isinstance(reason, within.TimeIsUp)
                self.say(
                    f"stopping all processes{f': {within.REASON}' if time_is_up else ' (Ctrl-C again kills them)'}"
                )
                return INTERRUPTED
            finally:
                self.placement.stop(grace_s=grace_s)

    def started(self, process: Process) -> None:
        """A role has been started, or started again."""

    def look(self) -> None:
        """Called every TICK_S while they run."""

    def _start(self, name: str) -> None:
        self._running.add(name)
        self.started(self.placement.start(*self._commands[name]))

    def _watch(self) -> int:
        while self._running:
            ended = self.placement.watch(TICK_S)
            check_placement(self.placement)
            for process in ended:
                self._running.discard(process.name)
                self._ended(process)
            self._interrupts.check()
            self.look()
        return 0

    def _ended(self, process: Process) -> None:
        if process.code == 0:
            return
        role, _ = self._commands[process.name]
        if gave_up(role.kind, process, was_registered=True) or not self._restarts.has_one_left(process.name):
            raise failure_of(process, self._restarts.used_up(process.name))
        why = cause_of(process)
        self.say(f"{process.name} {process.describe_end()}{f' ({why})' if why else ''}; it is started again")
        self._start(process.name)

    def _code(self) -> int:
        """The exit code for the first role that has failed."""
        failed = (process for process in self.placement.by_name.values() if process.ended and process.code != 0)
        code = next((process.code for process in failed), None)
        return FAILED if code is None else 128 - code if code < 0 else code
