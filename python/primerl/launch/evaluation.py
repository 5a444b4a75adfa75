"""`primerl eval`: an orchestrator that only evaluates, env workers, and for a checkpoint an engine.

    orchestrator ── writes run/orchestrator.json ──> engine and env workers start with its URL
         │         <── weights of version 0: the checkpoint's files (of an endpoint: none)
         └── exits 0 when all is measured ──> results.jsonl, summary.json, the table

A killed process is started again, and so is an env worker that failed after it had begun to work: the orchestrator
continues from its journal, and so does the same command. Exit codes: 0 measured, 1 nothing could be measured, or it was
given up, 2 bad input (nothing started), 130 interrupted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from primerl.config.errors import error_locations
from primerl.config.process_files import evaluation, resolve, run_file
from primerl.config.process_files import files as process_files
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.evaluation import EvalConfig
from primerl.evals import checkpoint, preflight, results
from primerl.forking import servers
from primerl.launch import cluster, placing
from primerl.launch.configs import NOWHERE
from primerl.launch.interpreters import lookup
from primerl.launch.placement.protocol import Placement, Process
from primerl.launch.preflight.output_folder import checked_and_left, claimed, holds_run
from primerl.launch.recovery import Recovery
from primerl.launch.registration import registered
from primerl.launch.report import status as orchestrator_status
from primerl.launch.report.console import PLAIN_EVERY_S, Console
from primerl.launch.report.logs import own_tail
from primerl.launch.report.notices import Remarks
from primerl.launch.secrets import Variables
from primerl.launch.slurm import submission, within
from primerl.launch.supervise.failures import BAD_INPUT, FAILED, INTERRUPTED, RefusedError, RunFailedError
from primerl.launch.supervise.orchestrator import OrchestratorWatch, sign_off_earlier, wait_for_orchestrator
from primerl.launch.supervise.watching import (
    LAST_WORDS_S,
    TICK_S,
    Interrupted,
    Interrupts,
    rounds,
    say_goodbye,
)
from primerl.models.tiny import write_text_model
from primerl.train.loop.client import NoMoreBatches, OrchestratorClient, OrchestratorError

# An orchestrator that has just said where it listens answers at once.
ANNOUNCE_S = 10.0
# Some models take as long to answer; longer waits are printed.
LONG_WAIT_S = 10.0


def run(config: EvalConfig, console: Console | None = None) -> int:
    """Runs to the end. Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] before anything starts."""
    console = console or Console()
    begun = placing.begun(config, console.say, saves=False)
    config, placement = begun.config, begun.placement
    console.say("checking the model, the environments and the folder")
    config = preflight.with_model(config)
    variables = preflight.check(config, console.say, placement)
    if begun.submits:
        return submission.submit(config, console.say, command="eval", goes_on=_has_begun)
    code = _measure(config, console, variables, placement, begun.limit)
    return within.ended(config, code, begun.limit, console.say)


def _has_begun(folder: Path) -> bool:
    return holds_run(folder) or (folder / "logs").is_dir()


def _measure(
    config: EvalConfig,
    console: Console,
    variables: Variables,
    placement: Placement,
    limit: within.TimeLimit | None,
) -> int:
    with claimed(config.output_dir, clean=config.clean_output_dir, kind="eval") as folder:
        if config.dry_run:
            if holds_run(folder):
                console.say(checked_and_left(folder))
                return 0
            write_configs(config, NOWHERE, variables)
            console.say(f"everything checked; resolved configs are in {folder / 'configs'}")
            return 0
        goes_on = not config.clean_output_dir and _has_begun(folder)
        with registered(config, folder, console.say, goes_on=goes_on) as session:
            measuring = Evaluation(config, folder, console, variables, placement, limit)
            session.exit_code = measuring.run()
            session.did_nothing, session.has_begun = measuring.did_nothing, measuring.has_begun
            return session.exit_code


def write_configs(config: EvalConfig, orchestrator_url: str, variables: Variables) -> list[ProcessConfig]:
    """All but the orchestrator's are returned."""
    run_file.write(config)
    if config.base_url is not None:
        write_text_model(evaluation.model_folder(config))
    process_files.write(evaluation.orchestrator(config))
    others = [
        *evaluation.inference(config, orchestrator_url),
        *evaluation.env_workers(config, orchestrator_url),
    ]
    for process in others:
        process_files.write(process)
    return [lookup.equipped(config.env, process, variables) for process in others]


class EvaluationRecovery(Recovery):
    """Which ends are due in an evaluation."""

    def ended(self, process: Process) -> None:
        kind = self.described[process.name].kind
        is_over = preflight.is_over(self.folder)
        if kind != "orchestrator" and is_over:
            return
        if process.code == 0 and kind in ("orchestrator", "env-worker"):
            if kind == "env-worker":
                self.early[process.name] = time.monotonic()
            elif not is_over:
                raise RunFailedError("the orchestrator was stopped; the same command resumes it")
            return
        left = self.signed_off(process)
        if not self.may_restart(process, left):
            raise self.failure(process, left)
        self.restart(process, left)


class Evaluation:
    """One start of it, from the folder's lock to the results."""

    def __init__(
        self,
        config: EvalConfig,
        folder: Path,
        console: Console,
        variables: Variables,
        placement: Placement,
        limit: within.TimeLimit | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.names = [entry.label for entry in config.env]
        self.variables = variables
        self.console = console
        self.placement = placement
        self.orchestrator = OrchestratorWatch(config.timeouts, folder / "logs")
        self.interrupts = Interrupts(also=None if limit is None else limit.check)
        self.recovery = EvaluationRecovery(
            placement, folder, self.orchestrator, config.restarts, console, self.interrupts.check
        )
        self.again = False  # what has failed is measured once more
        self.did_nothing = False  # all was measured already
        self.has_begun = False  # it measures by this config
        self.began = time.monotonic()
        self.printed = -PLAIN_EVERY_S
        self.remarks = Remarks(console.say)

    def run(self) -> int:
        code, reason = 0, ""
        try:
            self.again = preflight.measures_again(self.config, self.folder)
            if self.config.retry_errors and not self.again:
                self.console.say("nothing has failed here that could be measured again")
            is_over = not self.again and preflight.is_over(self.folder)
            self.did_nothing = is_over
            if not is_over or results.lack_scores(self.folder, self.names):
                # A start that ends from here on is recognised by these files.
                write_configs(self.config, NOWHERE, self.variables)
                # Reads all of the weights: before there is anything else to look after.
                manifest = self._publish()
                with self.placement:
                    code, reason = self._measured(manifest)
        except KeyboardInterrupt:
            code, reason = INTERRUPTED, "interrupted; the same command resumes it"
        if reason:
            self._say(reason)
        if code == BAD_INPUT:
            return code
        return self._tell(code)

    def _say(self, text: str) -> None:
        self.console.say(run_file.with_folder(text, self.config))

    def _publish(self) -> Path | None:
        """The checkpoint is version 0, which engines have to prove."""
        if self.config.base_url is not None:
            return None
        self.console.say("hashing the checkpoint's weights")
        trained_only = resolve.engine_backend(self.config).holds_trained_only
        return checkpoint.publish(evaluation.model_folder(self.config), self.folder, trained_only=trained_only)

    def _measured(self, manifest: Path | None) -> tuple[int, str]:
        code, reason = 0, ""
        with self.interrupts:
            try:
                if self._start(manifest):
                    self._watch()
            except RefusedError as refusal:
                # By 2, nothing was measured.
                code, reason = FAILED if self.has_begun else BAD_INPUT, error_locations.told(refusal)
            except RunFailedError as failure:
                code, reason = FAILED, f"the evaluation has failed: {failure}"
            except within.TimeIsUp:
                code, reason = INTERRUPTED, f"{within.REASON}; the same command resumes it"
            except Interrupted:
                code, reason = INTERRUPTED, "interrupted; the same command resumes it"
                self.console.say("stopping all processes (Ctrl-C again kills them)")
            self.placement.stop(grace_s=self.config.timeouts.stop_s)
        return code, reason

    def _start(self, manifest: Path | None) -> bool:
        """Returns whether there is something to do."""
        doing = "resuming the evaluation" if holds_run(self.folder) else "starting"
        self.console.say(f"{'measuring again what has failed' if self.again else doing} in {self.folder}")
        cluster.prepare(self.placement, self.folder, self.console.say, self.interrupts.check)
        orchestrator = evaluation.orchestrator(self.config)
        started = self.recovery.start(orchestrator, *(["--measure-again"] if self.again else []))
        url = wait_for_orchestrator(self.placement, started, self.folder, self.interrupts.check)
        if url is None:
            return False
        self.orchestrator.url = url
        processes = write_configs(self.config, url, self.variables)
        sign_off_earlier(url, processes)
        for process in processes:
            self.recovery.start(process)
        if manifest is not None:
            self._announce(manifest)
        self.orchestrator.begin()
        self.has_begun = True
        logs = self.folder / "logs"
        self.console.say(f"orchestrator at {url}; {len(self.recovery.described)} processes, logs in {logs}")
        return True

    def _announce(self, manifest: Path) -> None:
        while True:
            client = OrchestratorClient(self.orchestrator.url, ANNOUNCE_S)
            try:
                return client.weights(0, str(manifest))
            except NoMoreBatches:
                return None  # all is measured already, which is seen next
            except OrchestratorError as error:
                ended = self.placement.watch(TICK_S)
                for process in ended:
                    self.recovery.ended(process)
                self.interrupts.check()
                if not ended:
                    raise RefusedError.at(
                        "model",
                        f"the weights in {self.config.model} are refused: {error}; measure changed weights in "
                        "another --output-dir, or again with --clean-output-dir",
                    ) from None
            finally:
                client.close()

    def _watch(self) -> None:
        """Returns when all is measured."""
        check = self.interrupts.check
        for now, is_due in rounds(self.placement, self.recovery.ended, check):
            if self.placement.by_name["orchestrator"].ended:
                say_goodbye(self.placement, self.recovery.described, check)
                return
            if is_due:
                servers.tell_lost(self.console.say)
                self._look(now)
            for name, since in self.recovery.early.items():
                if now - since > LAST_WORDS_S:
                    log = own_tail(self.placement.by_name[name])
                    raise RunFailedError(f"{name} ended before the evaluation had\n{log}")

    def _look(self, now: float) -> None:
        status = self.orchestrator.ask(now)
        if status is None:
            return
        self.remarks.look(status)
        if now - self.printed >= PLAIN_EVERY_S:
            self.printed = now
            self.console.say(line(status))
        if self.orchestrator.is_ready:
            self.orchestrator.check_progress(status, now)
        elif missing := self._missing(status):
            self.orchestrator.check_start(missing, now - self.began)
        else:
            self.orchestrator.ready(now)

    def _missing(self, status: dict[str, Any]) -> list[str]:
        parts = orchestrator_status.missing(status, self.names)
        # There is no trainer, and with an endpoint no engine.
        absent = ("the trainer ",) if self.config.base_url is None else ("the trainer ", "no inference engine ")
        return [part for part in parts if not part.startswith(absent)]

    def _tell(self, code: int) -> int:
        """Writes the results, also of a part, and shows them."""
        if not holds_run(self.folder):
            return code  # nothing has begun
        where = {"base_url": self.config.base_url} if self.config.base_url is not None else {}
        measured = {"model": self.config.model, **where, "finished": preflight.is_over(self.folder)}
        summary = results.write(self.folder, self.names, measured, self._decode())
        if summary["finished"]:
            self.console.say(results.table(summary))
        done = sum(found["rollouts"] for found in summary["environments"].values())
        files = f"{self.folder / results.RESULTS}, {self.folder / results.SUMMARY}"
        self.console.say(f"{done} rollouts are in {files}")
        if summary["finished"]:
            for warning in results.warnings(self.folder, summary):
                self._say(warning)
        if code == 0 and not results.is_measured(summary):
            why = results.errors_of(self.folder)
            most = f"; most rollouts failed with {why}" if why else ""
            how = "the same command" if results.counts(self.folder) else "the same command with --retry-errors"
            self._say(f"nothing could be measured{most}; {how} measures it again")
            return FAILED
        # Scores of the fast ones are not what was asked for, and some callers read only the exit code.
        return code if not summary["finished"] or results.is_complete(summary) else code or FAILED

    def _decode(self) -> results.Decode | None:
        if self.config.base_url is not None:
            return None
        from primerl.render import Renderer

        return Renderer(evaluation.model_folder(self.config)).decode


def line(status: dict[str, Any]) -> str:
    """`24 rollouts measured, 1 failed, 32 in flight, 1,203 tokens/s; rollout 7 waits for an answer of ..`"""
    rollouts = status.get("rollouts", {})
    per_second = float(status.get("tokens", {}).get("per_second") or 0.0)
    rate = f", {per_second:,.0f} tokens/s" if per_second else ""
    # The end waits for all of it.
    waits = [wait for wait in status.get("waits", []) if not wait.get("end")]
    longest = orchestrator_status.longest_wait({**status, "waits": waits}, LONG_WAIT_S)
    return (
        f"{rollouts.get('evaluated', 0)} rollouts measured, {rollouts.get('failed', 0)} failed, "
        f"{rollouts.get('in_flight', 0)} in flight{rate}{'' if longest is None else f'; {longest}'}"
    )
