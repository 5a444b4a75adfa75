"""`primerl rl`: starts the processes of a run, watches them, ends them.

    orchestrator ── writes run/orchestrator.json ──> engines, env workers and trainer start at once with its URL
         │                                                            │
         └── GET /status: progress, waits ──> launcher <── exits ─────┘  (through the placement)

Who ends the run: the trainer exits 0 after its last step, the orchestrator exits 0 after the last evaluation, and the
launcher stops engines and env workers. What was killed is started again (`recovery`): the orchestrator continues from
its journal, the trainer from its checkpoint; and so is an env worker that ended otherwise, once it had begun to work.
Anything else that ends is named, with the last lines of its log, and ends the run; the same command continues it. An
orchestrator that is asked to stop sends the others home, and all exit 0: the steps that are trained show that the run
is not over. If that orchestrator is killed before it has ended, they are started again with it.
Exit codes: 0 finished, 1 a process failed, was stopped or nothing moved, 2 bad input (nothing started, or the
orchestrator refused the run in the folder), 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from primerl.config.errors import error_locations
from primerl.config.process_files import files, resolve, run_file
from primerl.config.schema.rl import RLConfig
from primerl.forking import servers
from primerl.launch import cluster, configs, placing, plan, reaching, remote_workers, secrets, storing
from primerl.launch.external_trainer import ExternalTrainer, is_trained
from primerl.launch.monitors import MonitorWatch, wanted
from primerl.launch.placement import commands, sharing
from primerl.launch.placement.fitting import Fitting
from primerl.launch.placement.protocol import Placement
from primerl.launch.placement.registry import chosen
from primerl.launch.preflight import hub, output_folder, training
from primerl.launch.recovery import RunRecovery
from primerl.launch.registration import registered
from primerl.launch.report import addresses, evaluations, summary
from primerl.launch.report import status as orchestrator_status
from primerl.launch.report.console import Console
from primerl.launch.report.logs import own_tail
from primerl.launch.report.notices import Remarks
from primerl.launch.resume import going_back, position, warm_start
from primerl.launch.slurm import submission, within
from primerl.launch.supervise.failures import BAD_INPUT, FAILED, INTERRUPTED, RefusedError, RunFailedError
from primerl.launch.supervise.orchestrator import OrchestratorWatch, sign_off_earlier, wait_for_orchestrator
from primerl.launch.supervise.watching import Interrupted, Interrupts, rounds, say_goodbye
from primerl.process import extras
from primerl.process.redaction import redact


def run(config: RLConfig, console: Console | None = None, *, form: str = "full") -> int:
    """Runs to the end. `form` is the one that the config was given in, for the list of runs.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] before anything starts.
    """
    console = console or Console()
    extras.require("`primerl rl`", "torch", "transformers")
    begun = placing.begun(config, console.say, saves=config.trainer.can_go_on)
    config, placement = begun.config, begun.placement
    going_back.check_trainer(config, Path(files.absolute(config.output_dir)))
    # Which takes ten seconds and more: environments are imported.
    console.say("checking the model, the environments and the ports")
    training.check_ahead(config, placement)
    config, shared = sharing.applied(hub.with_model(config))
    if shared is not None:
        console.say(shared)
    config = warm_start.applied(config)
    variables = training.check(config, console.say, placement)
    fitted = plan.fits(config, placement, commands.plan(placement, configs.processes(config)))
    if not config.dry_run:
        for problem in fitted.problems:
            console.say(f"this may not fit: {problem}")
    if begun.submits:
        if config.dry_run:
            with output_folder.claimed(config.output_dir, clean=False, kind="rl") as folder:
                end_dry_run(config, folder, console, variables, fitted)
        else:
            console.say(f"where the processes will run:\n{fitted.text()}")
        return submission.submit(config, console.say, command="rl", goes_on=output_folder.begun_in, form=form)
    code = _started(config, console, variables, fitted, placement, begun.limit, form)
    return within.ended(config, code, begun.limit, console.say)


def _started(
    config: RLConfig,
    console: Console,
    variables: secrets.Variables,
    fitted: Fitting,
    placement: Placement,
    limit: within.TimeLimit | None,
    form: str,
) -> int:
    with output_folder.claimed(config.output_dir, clean=config.clean_output_dir, kind="rl") as folder:
        if config.dry_run:
            return end_dry_run(config, folder, console, variables, fitted)
        goes_on = not config.clean_output_dir and output_folder.begun_in(folder)
        with registered(config, folder, console.say, goes_on=goes_on, form=form) as session:
            launcher = Launcher(config, folder, console, variables, session.run_id, placement, limit, fitted.gpus)
            if config.trainer.external:
                launcher.external = ExternalTrainer(config, folder, fitted.gpus_of("trainer"), console.say)
            session.exit_code = launcher.run()
            session.did_nothing, session.has_begun = launcher.did_nothing, launcher.has_begun
            return session.exit_code


def end_dry_run(config: RLConfig, folder: Path, console: Console, variables: secrets.Variables, fitted: Fitting) -> int:
    for remark in reaching.engines(config.orchestrator.engines):
        console.say(remark)
    if output_folder.can_go_on(folder):
        # Its configs tell what it was trained with, and `primerl verify` reads them.
        console.say(output_folder.checked_and_left(folder))
        return 0
    # As other machines reach it: each process may be started on one of its own.
    configs.write(config, addresses.reached_at(config.orchestrator.host, config.orchestrator.port), variables)
    monitor = wanted(config)
    if monitor is not None:
        files.write(monitor)
    console.say(f"where the processes would run:\n{fitted.text()}")
    console.say(f"everything checked; resolved configs are in {folder / 'configs'}")
    return 0


class Launcher:
    """One start of a run, from the folder's lock to its summary."""

    def __init__(
        self,
        config: RLConfig,
        folder: Path,
        console: Console,
        variables: secrets.Variables,
        run_id: str | None = None,
        placement: Placement | None = None,
        limit: within.TimeLimit | None = None,
        gpus: int = 0,
    ) -> None:
        self.config = config
        self.gpus = gpus
        self.variables = variables
        self.folder = folder
        self.run_id = run_id
        self.console = console
        self.began = time.monotonic()
        self.training_began: float | None = None
        self.interrupts = Interrupts(also=None if limit is None else limit.check)
        self.placement = placement or chosen(config.deployment, config.ray)
        self.orchestrator = OrchestratorWatch(config.timeouts, folder / "logs")
        self.recovery = RunRecovery(config, self.placement, folder, self.orchestrator, console, self.interrupts.check)
        self.evaluated = evaluations.Evaluated(console.say, position.evaluations(folder))
        self.remarks = Remarks(console.say)
        self.storing: storing.Storing | None = None
        self.external: ExternalTrainer | None = None
        self.sampled_before: dict[str, int] = {}
        self.did_nothing = False
        self.has_begun = False  # all processes were started by this config

    def run(self) -> int:
        code, reason = 0, "finished"
        is_killed = False
        with self.placement:
            try:
                with self.interrupts:
                    try:
                        self.did_nothing = not self._start()
                        if not self.did_nothing:
                            self._watch()
                        self._store()
                    except RefusedError as refusal:
                        # By 2, nothing was trained.
                        code, reason = FAILED if self.has_begun else BAD_INPUT, error_locations.told(refusal)
                        self.console.say(reason)
                    except RunFailedError as failure:
                        code, reason = FAILED, run_file.with_folder(str(failure), self.config)
                        self.console.say(f"the run has failed: {reason}")
                    except within.TimeIsUp:
                        code, reason = INTERRUPTED, within.REASON
                        self.console.say(f"stopping all processes: {reason}")
                    except Interrupted:
                        code, reason = INTERRUPTED, "interrupted"
                        self.console.say("stopping all processes (Ctrl-C again kills them)")
                    self._stop(code, reason)
            except KeyboardInterrupt:
                code, reason, is_killed = INTERRUPTED, "killed", True
                self.placement.stop(grace_s=0.0)
                self.console.say("killed")
            self._write_summary(code, reason)
        if code == 0:
            self.console.say(f"finished after {time.monotonic() - self.began:.1f} s; results are in {self.folder}")
        elif code == INTERRUPTED and not is_killed:
            self.console.say(
                f"{reason}; {going_back.same_command(self.config)} resumes {position.goes_on_from(self.folder)}"
            )
        return code

    # The start

    def _start(self) -> bool:
        """Returns whether there is something to do: the run in the folder may be over."""
        doing = "resuming the run" if output_folder.holds_run(self.folder) else "starting"
        self.console.say(f"{doing} in {self.folder}")
        cluster.prepare(self.placement, self.folder, self.console.say, self.interrupts.check)
        orchestrator = resolve.orchestrator(self.config, secrets.names_of_variables(self.variables))
        files.write(orchestrator)
        started = self.recovery.start(orchestrator, *going_back.flags(self.config, self.folder))
        url = wait_for_orchestrator(self.placement, started, self.folder, self.interrupts.check)
        if url is not None:
            status = orchestrator_status.fetch(url) or {}
            going_back.check_steps(self.config, status)
            self.sampled_before = summary.sampled_before(status)
        self._start_uploads()
        self._start_monitors()
        if url is None:
            self.console.say(f"nothing is left to do:\n{own_tail(started, lines=1)}")
            return False
        self.orchestrator.url = url
        again = position.trained_again(self.folder, self.config.trainer.ckpt)
        if again is not None:
            self.console.say(again)
        processes = configs.write(self.config, url, self.variables, self.run_id)
        sign_off_earlier(url, processes)
        for process in processes:
            if process.kind == "trainer":
                if self.external is not None:
                    continue
                orchestrator_status.trainer_starts(url)
            self.recovery.start(process)
        self.orchestrator.begin()
        self.has_begun = True
        count = len(self.recovery.described)
        self.console.say(f"orchestrator at {url}; {count} processes, logs in {self.folder / 'logs'}")
        page = addresses.page(url, self.folder, is_seen_once=sys.stdout.isatty())
        self.console.say(f"the run's page: {page}")
        waits = remote_workers.announcement(self.config, url, self.folder)
        if waits is not None:
            self.console.say(waits)
        if self.external is not None:
            self.console.say(self.external.announcement())
        return True

    def _start_monitors(self) -> None:
        described = wanted(self.config)
        if described is not None:
            self.recovery.described[described.name] = described
            monitors = MonitorWatch(described, self.folder, self.config.restarts, self.console.say)
            monitors.start(self.placement, going_back.wanted(self.config))
            self.recovery.monitors = monitors

    def _start_uploads(self) -> None:
        uploads = storing.process_of(self.config, self.run_id, self.folder)
        if uploads is not None:
            self.storing = storing.Storing(self.folder, self.run_id)
            files.write(uploads)
            self.recovery.start(uploads)

    # While it runs

    def _watch(self) -> None:
        """Returns when the run has finished."""
        check = self.interrupts.check
        for now, is_due in rounds(self.placement, self.recovery.ended, check):
            if self.placement.by_name["orchestrator"].ended:
                if self.external is not None or self.placement.by_name["trainer"].ended:
                    # The last ones ended after the last look at the status.
                    self.evaluated.look(position.evaluations(self.folder))
                    self._check_over()
                    self.console.end(position.last_metrics(self.folder), self.config.max_steps)
                    say_goodbye(self.placement, self.recovery.described, check)
                    return
            elif is_due:
                servers.tell_lost(self.console.say)
                self._look(now)
                self.recovery.check_workers(now)
                if self.recovery.monitors is not None:
                    self.recovery.monitors.look(self.placement)
            self.recovery.check_early(now)

    def _look(self, now: float) -> None:
        status = self.orchestrator.ask(now)
        if status is None:
            return
        if self.storing is not None:
            self.storing.look(self.console)
        self.remarks.look(status)
        self.console.update(status)
        self.evaluated.look(status.get("evaluations", []))
        waits = self.external is not None and self.external.waits(status, self.orchestrator.url, now)
        self.recovery.is_trained |= self.external is not None and is_trained(status)
        if self.orchestrator.is_ready:
            if waits:
                self.orchestrator.postpone(now)
            self.orchestrator.check_progress(status, now)
            return
        joining = remote_workers.missing(self.config, status)
        labels = [entry.label for entry in configs.entries(self.config) if entry.num_workers]
        if missing := orchestrator_status.missing(status, labels, trainer=self.external is None):
            self.orchestrator.check_start(missing, now - self.began)
        elif waits:
            pass  # for its own deadline
        elif not joining:
            self.orchestrator.ready(now)
            self.training_began = now
        elif now - self.began > self.config.timeouts.join_s:
            raise RunFailedError(remote_workers.too_late(self.config, joining))

    def _check_over(self) -> None:
        evaluates = bool(self.config.orchestrator.eval.env)
        stopped = position.cut_short(self.folder, self.config.max_steps, evaluates=evaluates)
        if stopped is not None:
            raise RunFailedError(stopped)

    # The end

    def _store(self) -> None:
        """Waits for the last uploads. The monitors keep running: they get the end after this."""
        if self.storing is not None:
            monitors = self.recovery.monitors
            stay = [] if monitors is None else [monitors.name]
            stop_s, check = self.config.timeouts.stop_s, self.interrupts.check
            self.storing.finish(self.placement, self.console, stop_s, stay=stay, check=check)

    def _stop(self, code: int, reason: str) -> None:
        """The monitors last: they get the run's end, and have time to send it."""
        stop_s, monitors = self.config.timeouts.stop_s, self.recovery.monitors
        if code == INTERRUPTED and self.storing is not None:
            self.storing.leave(self.placement, self.console)
        if monitors is not None:
            others = [name for name in self.placement.by_name if name != monitors.name]
            self.placement.stop(grace_s=stop_s, names=others)
            monitors.end(self.placement, code, redact(reason))
        self.placement.stop(grace_s=stop_s)

    def _write_summary(self, code: int, reason: str) -> None:
        described = self.recovery.described
        kinds = [(described[name].kind, process) for name, process in self.placement.by_name.items()]
        content = summary.contents(
            code,
            reason,
            began=self.began,
            training_began=self.training_began,
            processes=kinds,
            gpus=self.gpus,
            before=self.sampled_before,
            status=self.orchestrator.status,
        )
        # The last steps may be over before every part was seen; without a URL nothing was left to do.
        has_run = self.training_began is not None or (code == 0 and self.orchestrator.url != "")
        try:
            summary.write(self.folder, content, has_run=has_run)
        except OSError as error:  # a full disk may be why the run has failed, and that was reported
            self.console.say(f"{self.folder / summary.FILE} was not written: {error}")
