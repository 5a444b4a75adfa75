"""`primerl rl`: starts the processes of a run, watches them, ends them.

    orchestrator ── writes run/orchestrator.json ──> engines, env workers and trainer start at once with its URL
         │                                                            │
         └── GET /status: progress, waits ──> launcher <── exits ─────┘  (through the guard)

Who ends the run: the trainer exits 0 after its last step, the orchestrator exits 0 after the last evaluation, and the
launcher stops engines and env workers. What was killed is started again: the orchestrator goes on from its journal, the
trainer from its checkpoint; and so is an env worker that ended otherwise, once it had begun to work. Anything else that
ends is named, with the last lines of its log, and ends the run; the same command goes on from there. An orchestrator
that is asked to stop sends the others home, and all exit 0: what was trained tells that the run is not over. Is that
orchestrator killed before it has ended, they are started again with it.
Exit codes: 0 finished, 1 a process failed, was stopped or nothing moved, 2 bad input (nothing started, or the
orchestrator refused the run in the folder), 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from primerl.config.errors import error_locations, resume_refusal
from primerl.config.process_files import files, resolve, run_file
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.rl import RLConfig
from primerl.forking import servers
from primerl.launch import remote_workers, secrets, storing, tailnet
from primerl.launch.interpreters import lookup
from primerl.launch.monitors import MonitorWatch, wanted
from primerl.launch.preflight import hub, training
from primerl.launch.registration import registered
from primerl.launch.report import evaluations, summary
from primerl.launch.report import status as orchestrator_status
from primerl.launch.report.console import Console
from primerl.launch.report.notices import Remarks
from primerl.launch.resume import going_back, position, warm_start
from primerl.launch.supervise.processes import Process, Processes, cause_of, describe_end, tail
from primerl.launch.supervise.starting import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    RefusedError,
    RunFailedError,
    check_guard,
    failure_of,
    start,
    unchanged_if_refused,
    wait_for_orchestrator,
)
from primerl.launch.supervise.watching import (
    LAST_WORDS_S,
    STATUS_EVERY_S,
    TICK_S,
    Ended,
    Interrupted,
    Interrupts,
    OrchestratorWatch,
    Restarts,
    gave_up,
    say_goodbye,
)
from primerl.process import extras
from primerl.process.redaction import redact, redacted
from primerl.run_key import FILE, VARIABLE, run_key

# On top of the orchestrator's timeouts.worker_s: a worker that lives registers again at once.
WORKER_ABSENT_S = 10.0


def run(config: RLConfig, console: Console | None = None, *, form: str = "full") -> int:
    """Runs to the end. `form` is the one that the config was given in, for the list of runs.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] before anything starts.
    """
    console = console or Console()
    extras.require("`primerl rl`", "torch", "transformers")
    # Which takes ten seconds and more: environments are imported.
    console.say("checking the model, the environments and the ports")
    training.check_ahead(config)
    config = hub.with_model(config)
    config = warm_start.applied(config)
    variables = training.check(config, console.say)
    with training.claimed(config.output_dir, clean=config.clean_output_dir) as folder:
        if config.dry_run:
            return end_dry_run(config, folder, console, variables)
        goes_on = not config.clean_output_dir and training.begun_in(folder)
        with registered(config, folder, console.say, goes_on=goes_on, form=form) as session:
            session.exit_code = Launcher(config, folder, console, variables, session.run_id).run()
            return session.exit_code


def page_address(url: str, folder: Path, *, is_seen_once: bool) -> str:
    """With the key that the run has made, where the output is a terminal; what is printed elsewhere ends in logs."""
    parts = urlsplit(url)
    url = remote_workers.reached_at(parts.hostname or "", parts.port)
    file = folder / FILE
    if not file.is_file():
        return f"{url}/#key=... (the value of {VARIABLE})"
    return f"{url}/#key={run_key(folder)}" if is_seen_once else f"{url}/#key=... (the content of {file})"


def end_dry_run(config: RLConfig, folder: Path, console: Console, variables: secrets.Variables) -> int:
    if training.holds_run(folder):
        # Its configs tell what it was trained with, and `primerl verify` reads them.
        console.say(f"everything checked; a start goes on with the run in {folder}, whose configs are left as they are")
        return 0
    # As other machines reach it: each process may be started on one of its own.
    write_configs(config, remote_workers.reached_at(config.orchestrator.host, config.orchestrator.port), variables)
    monitor = wanted(config)
    if monitor is not None:
        files.write(monitor)
    console.say(f"everything checked; resolved configs are in {folder / 'configs'}")
    return 0


def write_configs(
    config: RLConfig, orchestrator_url: str, variables: secrets.Variables, run_id: str | None = None
) -> list[ProcessConfig]:
    """All but the orchestrator's, which is written before the URL is known, are returned. Beside them the whole run's,
    in the full form: `primerl rl @ configs/rl.toml`."""
    run_file.write(config)
    files.write(resolve.orchestrator(config, secrets.names_of_variables(variables)))
    others = [
        *resolve.inference(config, orchestrator_url),
        *resolve.env_workers(config, orchestrator_url, run_id),
        resolve.trainer(config, orchestrator_url),
    ]
    for process in others:
        files.write(process)
    return [lookup.equipped(training.entries(config), process, variables) for process in others]


class Launcher:
    def __init__(
        self,
        config: RLConfig,
        folder: Path,
        console: Console,
        variables: secrets.Variables,
        run_id: str | None = None,
    ) -> None:
        self.config = config
        self.variables = variables
        self.folder = folder
        self.run_id = run_id
        self.console = console
        self.began = time.monotonic()
        self.interrupts = Interrupts()
        self.described: dict[str, ProcessConfig] = {}
        self.restarts = Restarts(config.restarts)
        self.orchestrator = OrchestratorWatch(config.timeouts, folder / "logs")
        self.status: dict[str, Any] = {}
        self.evaluated = evaluations.Evaluated(console.say, position.evaluations(folder))
        self.remarks = Remarks(console.say)
        self.training_began: float | None = None
        sources = config.orchestrator
        self.environments = [entry.label for entry in [*sources.train.env, *sources.eval.env] if entry.num_workers]
        self.workers_seen: dict[str, float] = {}  # when the orchestrator last knew each env worker
        # Ended without error, but too early unless the run ends within LAST_WORDS_S.
        self.early: dict[str, float] = {}
        self.is_trained = False  # the trainer has ended after the last step
        self.orchestrator_back: float | None = None  # when it was last started again
        self.monitors: MonitorWatch | None = None
        self.uploads = storing.process_of(config, run_id, folder)
        self.storing: storing.Storing | None = None

    def run(self) -> int:
        code, reason = 0, "finished"
        with Processes() as processes:
            try:
                with self.interrupts:
                    try:
                        if self._start(processes):
                            self._watch(processes)
                        if self.storing is not None:
                            # The monitors are told of the end, after this.
                            stay = [] if self.monitors is None else [self.monitors.name]
                            self.storing.finish(
                                processes,
                                self.console,
                                self.config.timeouts.stop_s,
                                stay=stay,
                                check=self.interrupts.check,
                            )
                    except RefusedError as refusal:
                        code, reason = (
                            BAD_INPUT,
                            error_locations.told(resume_refusal.in_words_of(self.config, str(refusal))),
                        )
                        self.console.say(reason)
                    except RunFailedError as failure:
                        code, reason = FAILED, run_file.with_folder(str(failure), self.config)
                        self.console.say(f"the run has failed: {reason}")
                    except Interrupted:
                        code, reason = INTERRUPTED, "interrupted"
                        self.console.say("stopping all processes (Ctrl-C again kills them)")
                    self._stop(processes, code, reason)
            except KeyboardInterrupt:
                code, reason = INTERRUPTED, "killed"
                processes.kill()
                self.console.say("killed")
            self._write_summary(processes, code, reason)
        if code == 0:
            self.console.say(f"finished after {time.monotonic() - self.began:.1f} s; results are in {self.folder}")
        elif reason == "interrupted":
            self.console.say(f"interrupted; {self._same_command()} goes on {position.goes_on_from(self.folder)}")
        return code

    def _same_command(self) -> str:
        ckpt = self.config.trainer.ckpt
        goes_back = ckpt is not None and ckpt.resume_step not in (None, -1)
        given = {
            "--clean-output-dir": self.config.clean_output_dir,
            "ckpt.resume_step": goes_back,
            "skip_event": self.config.skip_event is not None,
        }
        but = " and ".join(name for name, is_given in given.items() if is_given)
        same = run_file.with_folder("the same command", self.config)
        return f"{same} without {but}" if but else same

    def _stop(self, processes: Processes, code: int, reason: str) -> None:
        """The monitors last: they are told how it ended, and have time to send it."""
        if code == INTERRUPTED and self.storing is not None:
            self.storing.leave(processes, self.console)
        if self.monitors is not None:
            others = [name for name in processes.by_name if name != self.monitors.name]
            processes.stop(grace_s=self.config.timeouts.stop_s, names=others)
            self.monitors.end(processes, code, redact(reason))
        processes.stop(grace_s=self.config.timeouts.stop_s)

    def _start(self, processes: Processes) -> bool:
        """Returns whether there is something to do: the run in the folder may be over."""
        doing = "going on with the run" if training.holds_run(self.folder) else "starting"
        self.console.say(f"{doing} in {self.folder}")
        orchestrator = resolve.orchestrator(self.config, secrets.names_of_variables(self.variables))
        self.described[orchestrator.name] = orchestrator
        with unchanged_if_refused(orchestrator.file):
            files.write(orchestrator)
            started = start(processes, orchestrator, *going_back.flags(self.config, self.folder))
            url = wait_for_orchestrator(processes, started, self.folder, self.interrupts.check)
        if url is not None:
            going_back.check_steps(self.config, url)
        self._start_uploads(processes)
        self._start_monitors(processes)
        if url is None:
            self.console.say(f"nothing is left to do:\n{tail(started.log, lines=1)}")
            return False
        self.orchestrator.url = url
        again = position.trained_again(self.folder, self.config.trainer.ckpt)
        if again is not None:
            self.console.say(again)
        for process in write_configs(self.config, url, self.variables, self.run_id):
            self.described[process.name] = process
            if process.kind == "trainer":
                orchestrator_status.trainer_starts(url)
            start(processes, process)
        self.orchestrator.begin()
        self.console.say(f"orchestrator at {url}; {len(self.described)} processes, logs in {self.folder / 'logs'}")
        page = page_address(url, self.folder, is_seen_once=sys.stdout.isatty())
        self.console.say(f"the run's page: {page}")
        waits = remote_workers.announcement(self.config, url, self.folder)
        if waits is not None:
            self.console.say(waits)
        return True

    def _start_monitors(self, processes: Processes) -> None:
        described = wanted(self.config)
        if described is not None:
            self.described[described.name] = described
            self.monitors = MonitorWatch(described, self.folder, self.config.restarts, self.console.say)
            self.monitors.start(processes, going_back.wanted(self.config))

    def _start_uploads(self, processes: Processes) -> None:
        if self.uploads is None:
            return
        self.storing = storing.Storing(self.folder, self.run_id)
        files.write(self.uploads)
        self.described[self.uploads.name] = self.uploads
        start(processes, self.uploads)

    def _watch(self, processes: Processes) -> None:
        """Returns when the run has finished."""
        asked = 0.0
        while True:
            for process in processes.poll(TICK_S):
                self._ended(processes, process)
            check_guard(processes)
            self.interrupts.check()
            now = time.monotonic()
            if processes.by_name["orchestrator"].ended:
                if processes.by_name["trainer"].ended:
                    # The last ones ended after the last look at the status.
                    self.evaluated.look(position.evaluations(self.folder))
                    self._check_over()
                    self.console.end(position.last_metrics(self.folder), self.config.max_steps)
                    return say_goodbye(processes, self.described, self.interrupts.check)
            elif now - asked >= STATUS_EVERY_S:
                asked = now
                servers.tell_lost(self.console.say)
                self._look(now)
                self._look_for_workers(processes, now)
                if self.monitors is not None:
                    self.monitors.look(processes)
            for name in [name for name, since in self.early.items() if now - since > LAST_WORDS_S]:
                self._ended_too_early(processes, processes.by_name[name])

    def _check_over(self) -> None:
        evaluates = bool(self.config.orchestrator.eval.env)
        stopped = position.cut_short(self.folder, self.config.max_steps, evaluates=evaluates)
        if stopped is not None:
            raise RunFailedError(stopped)

    def _ended_too_early(self, processes: Processes, process: Process) -> None:
        """The run did not end soon after the process: it has missed something, unless everything is trained."""
        if self.is_trained:
            return None
        back = self.orchestrator_back
        if back is not None and self.early[process.name] - back < LAST_WORDS_S and process.name != "orchestrator":
            # It went because the orchestrator that was killed had told it to.
            return self._call_back(processes, process)
        if self.described[process.name].kind == "env-worker" and self.restarts.has_one_left(process.name):
            del self.early[process.name]
            return self._restart(processes, process, self._signed_off(process))
        used_up = self.restarts.used_up(process.name)
        raise RunFailedError(f"{process.name} ended before the run had{used_up}\n{tail(process.log)}")

    def _call_back(self, processes: Processes, process: Process) -> None:
        """Starts a process again that was told that the run is over, when it is not."""
        if not self.restarts.has_one_left(process.name):
            raise RunFailedError(
                f"{process.name} ended before the run had, and `restarts` = {self.config.restarts} does not allow to "
                f"start it again; the same command goes on\n{tail(process.log)}"
            )
        self.console.say(f"{process.name} was told that the run is over, which it is not; it is started again")
        del self.early[process.name]
        self.workers_seen.pop(process.name, None)
        self._announce(process, "was told that the run is over")
        start(processes, self.described[process.name])

    def _ended(self, processes: Processes, process: Process) -> None:
        kind = self.described[process.name].kind
        if self.monitors is not None and kind == "monitor":
            return self.monitors.ended(process)
        if kind == "store-worker":
            return self._uploads_ended(processes, process)
        if process.code == 0 and kind in ("trainer", "orchestrator", "env-worker"):
            self.early[process.name] = time.monotonic()
            if kind == "trainer":
                self.is_trained = position.trained_steps(self.folder) >= self.config.max_steps
            return None
        if kind in ("inference", "env-worker") and orchestrator_status.finished(self.status):
            return None
        left = self._signed_off(process)
        if processes.guard_end is None and self._may_restart(process, left):
            return self._restart(processes, process, left)
        if kind == "trainer" and (process.code or 0) < 0 and not self.config.trainer.can_go_on:
            raise RunFailedError(
                f"{describe_end(process)}\nit saves no checkpoints, so it is not started again; with "
                "ckpt.interval (without weights_only) it would go on from the last one"
            )
        raise failure_of(process, left.told() + self.restarts.used_up(process.name))

    def _signed_off(self, ended: Process) -> Ended:
        return self.orchestrator.sign_off(ended, self.described[ended.name])

    def _uploads_ended(self, processes: Processes, process: Process) -> None:
        """Training goes on without: the last word is said at the end, and the next start uploads the rest."""
        if processes.guard_end is None and self._may_restart(process, Ended()):
            self._restart(processes, process, Ended())
        else:
            self.console.say(f"nothing is stored any more: {describe_end(process)}")

    def _may_restart(self, process: Process, left: Ended) -> bool:
        described = self.described[process.name]
        if gave_up(described.kind, process, left.was_registered) and tailnet.lost(described, process) is None:
            return False
        if process.name == "trainer" and not self.config.trainer.can_go_on:
            return False
        return self.restarts.has_one_left(process.name)

    def _restart(self, processes: Processes, killed: Process, left: Ended) -> None:
        """The same command."""
        why = tailnet.lost(self.described[killed.name], killed) or cause_of(killed)
        how = f"{killed.describe_end()}{f' ({why})' if why else ''}{left.told()}"
        self.console.say(f"{killed.name} {how}; it is started again")
        self._announce(killed, killed.describe_end())
        process = start(processes, self.described[killed.name])
        self.workers_seen.pop(killed.name, None)
        if killed.name != "orchestrator":
            return
        url = wait_for_orchestrator(
            processes, process, self.folder, self.interrupts.check, lambda ended: self._ended(processes, ended)
        )
        self.orchestrator.begin_again(url)
        self.orchestrator_back = time.monotonic()
        self.workers_seen.clear()
        if url is None:
            self.early[process.name] = self.orchestrator_back
            return
        for name in list(self.early):
            if name != "trainer" or not self.is_trained:
                self._call_back(processes, processes.by_name[name])

    def _announce(self, ended: Process, why: str) -> None:
        """Has the orchestrator wait for a trainer that is started again for as long as a start may take."""
        if self.described[ended.name].kind == "trainer" and self.orchestrator.url:
            orchestrator_status.trainer_starts(self.orchestrator.url, self.config.timeouts.start_s, why)

    def _look(self, now: float) -> None:
        status = self.orchestrator.ask(now)
        if status is None:
            return
        self.status = status
        if self.storing is not None:
            self.storing.look(self.console)
        self.remarks.look(status)
        self.console.update(status)
        self.evaluated.look(status.get("evaluations", []))
        if self.orchestrator.is_ready:
            self.orchestrator.check_progress(status, now)
            return
        joining = remote_workers.missing(self.config, status)
        if missing := orchestrator_status.missing(status, self.environments):
            self.orchestrator.check_start(missing, now - self.began)
        elif not joining:
            self.orchestrator.ready(now)
            self.training_began = now
        elif now - self.began > self.config.timeouts.join_s:
            raise RunFailedError(remote_workers.too_late(self.config, joining))

    def _look_for_workers(self, processes: Processes, now: float) -> None:
        if self.orchestrator.heard != now or orchestrator_status.finished(self.status):
            return
        known = orchestrator_status.worker_pids(self.status)
        for name, process in processes.by_name.items():
            if self.described[name].kind != "env-worker" or process.ended:
                continue
            if process.pid in known:
                self.workers_seen[name] = now
            elif (absent := now - self.workers_seen.get(name, now)) > WORKER_ABSENT_S:
                raise RunFailedError(
                    f"{name} hangs: the orchestrator gave it up {absent:.0f} s ago, and it has not come back; "
                    f"the end of {process.log}:\n{tail(process.log)}"
                )

    def _write_summary(self, processes: Processes, code: int, reason: str) -> None:
        kinds = [(self.described[name].kind, process) for name, process in processes.by_name.items()]
        content = {
            "exit_code": code,
            "reason": redact(reason),
            **summary.times(self.began, self.training_began),
            **summary.processor(kinds),
            # What an environment says of a failure may hold a secret of its own.
            "status": redacted(self.status),
        }
        # The last steps may be over before every part was seen; without a URL nothing was left to do.
        has_run = self.training_began is not None or (code == 0 and self.orchestrator.url != "")
        try:
            summary.write(self.folder, content, has_run=has_run)
        except OSError as error:  # a full disk may be why the run has failed, and that was said
            self.console.say(f"{self.folder / summary.FILE} was not written: {error}")
