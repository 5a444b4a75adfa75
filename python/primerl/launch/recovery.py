"""What the end of a process means for a launch: it was due, the process is started again, or the run has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.rl import RLConfig
from primerl.launch import tailnet
from primerl.launch.monitors import MonitorWatch
from primerl.launch.placement.commands import start
from primerl.launch.placement.protocol import Placement, Process
from primerl.launch.report import status as orchestrator_status
from primerl.launch.report.console import Console
from primerl.launch.report.logs import cause_of, describe_end, own_tail, tail
from primerl.launch.resume import position
from primerl.launch.supervise.failures import RunFailedError, failure_of
from primerl.launch.supervise.orchestrator import Ended, OrchestratorWatch, wait_for_orchestrator
from primerl.launch.supervise.watching import LAST_WORDS_S, Restarts, gave_up

# On top of the orchestrator's timeouts.worker_s: a worker that lives registers again at once.
WORKER_ABSENT_S = 10.0


class Recovery:
    """The processes of a launch: started, and started again after they were killed."""

    def __init__(
        self,
        placement: Placement,
        folder: Path,
        orchestrator: OrchestratorWatch,
        restarts: int,
        console: Console,
        check: Callable[[], None],
    ) -> None:
        """`check`: called while it waits; may raise, to give up."""
        self.placement = placement
        self.folder = folder
        self.orchestrator = orchestrator
        self.restarts = Restarts(restarts)
        self.console = console
        self.check = check
        self.described: dict[str, ProcessConfig] = {}
        self.early: dict[str, float] = {}
        """When a process ended without error, but too early unless the run ends within LAST_WORDS_S."""

    def start(self, described: ProcessConfig, *flags: str) -> Process:
        """`flags`: of this start alone."""
        self.described[described.name] = described
        return start(self.placement, described, *flags)

    def ended(self, process: Process) -> None:
        """Raises RunFailedError where the run cannot continue without it."""
        raise NotImplementedError

    def signed_off(self, process: Process) -> Ended:
        return self.orchestrator.sign_off(process, self.described[process.name])

    def may_restart(self, process: Process, left: Ended) -> bool:
        """Counts as a restart where it may."""
        described = self.described[process.name]
        if gave_up(described.kind, process, left.was_registered) and tailnet.lost(described, process) is None:
            return False
        return self.placement.lost is None and self.restarts.has_one_left(process.name)

    def restart(self, killed: Process, left: Ended) -> str | None:
        """By the same command. Returns the URL of an orchestrator that was started again."""
        why = tailnet.lost(self.described[killed.name], killed) or cause_of(killed)
        how = f"{killed.describe_end()}{f' ({why})' if why else ''}{left.told()}"
        self.console.say(f"{killed.name} {how}; it is started again")
        process = start(self.placement, self.described[killed.name])
        if killed.name != "orchestrator":
            return None
        url = wait_for_orchestrator(self.placement, process, self.folder, self.check, self.ended)
        self.orchestrator.begin_again(url)
        return url

    def failure(self, process: Process, left: Ended) -> RunFailedError:
        return failure_of(process, left.told() + self.restarts.used_up(process.name))


class RunRecovery(Recovery):
    """The same of a training run, in which the trainer and env workers may be called back as well."""

    def __init__(
        self,
        config: RLConfig,
        placement: Placement,
        folder: Path,
        orchestrator: OrchestratorWatch,
        console: Console,
        check: Callable[[], None],
    ) -> None:
        super().__init__(placement, folder, orchestrator, config.restarts, console, check)
        self.config = config
        self.monitors: MonitorWatch | None = None
        self.is_trained = False
        """Whether the trainer has ended after the last step."""
        self._orchestrator_back: float | None = None  # when it was last started again
        self._workers_seen: dict[str, float] = {}  # when the orchestrator last knew each env worker

    def ended(self, process: Process) -> None:
        kind = self.described[process.name].kind
        if self.monitors is not None and kind == "monitor":
            return self.monitors.ended(process)
        if kind == "store-worker":
            return self._uploads_ended(process)
        if process.code == 0 and kind in ("trainer", "orchestrator", "env-worker"):
            self.early[process.name] = time.monotonic()
            if kind == "trainer":
                self.is_trained = position.trained_steps(self.folder) >= self.config.max_steps
            return None
        if kind in ("inference", "env-worker") and orchestrator_status.finished(self.orchestrator.status):
            return None
        left = self.signed_off(process)
        if self.may_restart(process, left):
            self.restart(process, left)
            return None
        if kind == "trainer" and (process.code or 0) < 0 and not self.config.trainer.can_go_on:
            remark = (
                "; it saves no checkpoints, so it is not started again; with ckpt.interval (without weights_only) it "
                "would resume from the last one"
            )
            raise RunFailedError(describe_end(process, remark))
        raise self.failure(process, left)

    def may_restart(self, process: Process, left: Ended) -> bool:
        if process.name == "trainer" and not self.config.trainer.can_go_on:
            return False
        return super().may_restart(process, left)

    def restart(self, killed: Process, left: Ended) -> str | None:
        self._announce(killed, killed.describe_end())
        self._workers_seen.pop(killed.name, None)
        url = super().restart(killed, left)
        if killed.name != "orchestrator":
            return None
        self._orchestrator_back = time.monotonic()
        self._workers_seen.clear()
        if url is None:
            self.early[killed.name] = self._orchestrator_back
            return None
        for name in list(self.early):
            if name != "trainer" or not self.is_trained:
                self._call_back(self.placement.by_name[name])
        return url

    def check_early(self, now: float) -> None:
        """Processes that ended well, but after which the run did not end soon."""
        for name in [name for name, since in self.early.items() if now - since > LAST_WORDS_S]:
            self.ended_too_early(self.placement.by_name[name])

    def ended_too_early(self, process: Process) -> None:
        """It has missed something, unless everything is trained."""
        if self.is_trained:
            return None
        back = self._orchestrator_back
        if back is not None and self.early[process.name] - back < LAST_WORDS_S and process.name != "orchestrator":
            # The orchestrator that was killed had told it to end.
            return self._call_back(process)
        if self.described[process.name].kind == "env-worker" and self.restarts.has_one_left(process.name):
            del self.early[process.name]
            self.restart(process, self.signed_off(process))
            return None
        used_up = self.restarts.used_up(process.name)
        raise RunFailedError(f"{process.name} ended before the run had{used_up}\n{own_tail(process)}")

    def check_workers(self, now: float) -> None:
        """Raises RunFailedError for an env worker that runs, and that the orchestrator has given up."""
        status = self.orchestrator.status
        if self.orchestrator.heard != now or orchestrator_status.finished(status):
            return
        known = orchestrator_status.worker_pids(status)
        for name, process in self.placement.by_name.items():
            if self.described[name].kind != "env-worker" or process.ended:
                continue
            if process.pid in known:
                self._workers_seen[name] = now
            elif (absent := now - self._workers_seen.get(name, now)) > WORKER_ABSENT_S:
                log = self.placement.logs(name)
                raise RunFailedError(
                    f"{name} hangs: the orchestrator dropped it {absent:.0f} s ago, and it has not registered "
                    f"again\nthe end of {log}:\n{tail(log, after=process.log_from)}"
                )

    def _call_back(self, process: Process) -> None:
        """Starts a process again that ended as if the run had finished."""
        if not self.restarts.has_one_left(process.name):
            raise RunFailedError(
                f"{process.name} ended before the run had, and `restarts` = {self.config.restarts} does not allow to "
                f"start it again; the same command resumes the run\n{own_tail(process)}"
            )
        self.console.say(f"{process.name} ended as if the run had finished, but the run has not; it is started again")
        del self.early[process.name]
        self._workers_seen.pop(process.name, None)
        self._announce(process, "ended as if the run had finished")
        start(self.placement, self.described[process.name])

    def _uploads_ended(self, process: Process) -> None:
        """Training continues without: the end of the run reports it, and the next start uploads the rest."""
        if self.may_restart(process, Ended()):
            self.restart(process, Ended())
        else:
            self.console.say(f"uploads to the store have stopped: {describe_end(process)}")

    def _announce(self, ended: Process, why: str) -> None:
        """Has the orchestrator wait for a trainer that is started again for as long as a start may take."""
        if self.described[ended.name].kind == "trainer" and self.orchestrator.url:
            orchestrator_status.trainer_starts(self.orchestrator.url, self.config.timeouts.start_s, why)
