"""`primerl eval`: an orchestrator that only evaluates, env workers, and for a checkpoint an engine.

    orchestrator ── writes run/orchestrator.json ──> engine and env workers start with its URL
         │         <── weights of version 0: the checkpoint's files (of an endpoint: none)
         └── exits 0 when all is measured ──> results.jsonl, summary.json, the table

What was killed is started again, and an env worker that ended otherwise after it had begun to work: the orchestrator
goes on from its journal, and so does the same command. Exit codes: 0 measured, 1 nothing could be measured, or it was
given up, 2 bad input (nothing started), 130 interrupted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from primerl.config.errors import error_locations
from primerl.config.process_files import evaluation, run_file
from primerl.config.process_files import files as process_files
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.evaluation import EvalConfig
from primerl.evals import checkpoint, preflight, results
from primerl.forking import servers
from primerl.launch.interpreters import lookup
from primerl.launch.preflight.training import claimed, holds_run
from primerl.launch.registration import registered
from primerl.launch.report import status as orchestrator_status
from primerl.launch.report.console import PLAIN_EVERY_S, Console
from primerl.launch.report.notices import Remarks
from primerl.launch.secrets import Variables
from primerl.launch.supervise.processes import Process, Processes, cause_of, tail
from primerl.launch.supervise.starting import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    RefusedError,
    RunFailedError,
    check_guard,
    failure_of,
    start,
    wait_for_orchestrator,
)
from primerl.launch.supervise.watching import (
    LAST_WORDS_S,
    STATUS_EVERY_S,
    TICK_S,
    Interrupted,
    Interrupts,
    OrchestratorWatch,
    Restarts,
    gave_up,
    say_goodbye,
)
from primerl.models.tiny import write_text_model
from primerl.train.loop.client import NoMoreBatches, OrchestratorClient, OrchestratorError

# Until the orchestrator says where it listens.
NOWHERE = "http://127.0.0.1:0"
# An orchestrator that has just said where it listens answers at once.
ANNOUNCE_S = 10.0
# Answers that take as long are how some models are; what waits for longer is told.
LONG_WAIT_S = 10.0


def run(config: EvalConfig, console: Console | None = None) -> int:
    """Runs to the end. Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] before anything starts."""
    console = console or Console()
    console.say("checking the model, the environments and the folder")
    config = preflight.with_model(config)
    variables = preflight.check(config, console.say)
    with claimed(config.output_dir, clean=config.clean_output_dir) as folder:
        if config.dry_run:
            if not holds_run(folder):
                write_configs(config, NOWHERE, variables)
            console.say(f"everything checked; resolved configs are in {folder / 'configs'}")
            return 0
        goes_on = not config.clean_output_dir and (holds_run(folder) or (folder / "logs").is_dir())
        with registered(config, folder, console.say, goes_on=goes_on) as session:
            session.exit_code = Evaluation(config, folder, console, variables).run()
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


class Evaluation:
    """One start of it, from the folder's lock to the results."""

    def __init__(self, config: EvalConfig, folder: Path, console: Console, variables: Variables) -> None:
        self.config = config
        self.folder = folder
        self.names = [entry.label for entry in config.env]
        self.variables = variables
        self.console = console
        self.described: dict[str, ProcessConfig] = {}
        self.restarts = Restarts(config.restarts)
        self.orchestrator = OrchestratorWatch(config.timeouts, folder / "logs")
        self.early: dict[str, float] = {}  # when they ended well, though it is not over
        self.again = False  # what has failed is measured once more
        self.interrupts = Interrupts()
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
            if not is_over or results.lack_scores(self.folder, self.names):
                # A start that ends from here on can be told from another's folder.
                write_configs(self.config, NOWHERE, self.variables)
                # Reads all of the weights: before there is anything else to look after.
                manifest = self._publish()
                with Processes() as processes:
                    code, reason = self._measured(processes, manifest)
        except KeyboardInterrupt:
            code, reason = INTERRUPTED, "interrupted; the same command goes on"
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
        return checkpoint.publish(evaluation.model_folder(self.config), self.folder)

    def _measured(self, processes: Processes, manifest: Path | None) -> tuple[int, str]:
        code, reason = 0, ""
        with self.interrupts:
            try:
                if self._start(processes, manifest):
                    self._watch(processes)
            except RefusedError as refusal:
                code, reason = BAD_INPUT, error_locations.told(str(refusal))
            except RunFailedError as failure:
                code, reason = FAILED, f"the evaluation has failed: {failure}"
            except Interrupted:
                code, reason = INTERRUPTED, "interrupted; the same command goes on"
                self.console.say("stopping all processes (Ctrl-C again kills them)")
            processes.stop(grace_s=self.config.timeouts.stop_s)
        return code, reason

    def _start(self, processes: Processes, manifest: Path | None) -> bool:
        """Returns whether there is something to do."""
        doing = "going on with the evaluation" if holds_run(self.folder) else "starting"
        self.console.say(f"{'measuring again what has failed' if self.again else doing} in {self.folder}")
        orchestrator = evaluation.orchestrator(self.config)
        self.described[orchestrator.name] = orchestrator
        started = start(processes, orchestrator, *(["--measure-again"] if self.again else []))
        url = wait_for_orchestrator(processes, started, self.folder, self.interrupts.check)
        if url is None:
            return False
        self.orchestrator.url = url
        for process in write_configs(self.config, url, self.variables):
            self.described[process.name] = process
            start(processes, process)
        if manifest is not None:
            self._announce(processes, manifest)
        self.orchestrator.begin()
        logs = self.folder / "logs"
        self.console.say(f"orchestrator at {url}; {len(self.described)} processes, logs in {logs}")
        return True

    def _announce(self, processes: Processes, manifest: Path) -> None:
        while True:
            client = OrchestratorClient(self.orchestrator.url, ANNOUNCE_S)
            try:
                return client.weights(0, str(manifest))
            except NoMoreBatches:
                return None  # all is measured already, which is seen next
            except OrchestratorError as error:
                ended = list(processes.poll(TICK_S))
                for process in ended:
                    self._ended(processes, process)
                self.interrupts.check()
                if not ended:
                    raise RefusedError(
                        f"model: the weights in {self.config.model} are refused: {error}; measure changed weights in "
                        "another --output-dir, or anew with --clean-output-dir"
                    ) from None
            finally:
                client.close()

    def _watch(self, processes: Processes) -> None:
        """Returns when all is measured."""
        asked = 0.0
        while True:
            for process in processes.poll(TICK_S):
                self._ended(processes, process)
            check_guard(processes)
            self.interrupts.check()
            if processes.by_name["orchestrator"].ended:
                return say_goodbye(processes, self.described, self.interrupts.check)
            now = time.monotonic()
            if now - asked >= STATUS_EVERY_S:
                asked = now
                servers.tell_lost(self.console.say)
                self._look(now)
            for name, since in self.early.items():
                if now - since > LAST_WORDS_S:
                    log = tail(processes.by_name[name].log)
                    raise RunFailedError(f"{name} ended before the evaluation had\n{log}")

    def _ended(self, processes: Processes, process: Process) -> None:
        kind = self.described[process.name].kind
        if kind != "orchestrator" and preflight.is_over(self.folder):
            return
        if process.code == 0 and kind in ("orchestrator", "env-worker"):
            if kind == "env-worker":
                self.early[process.name] = time.monotonic()
            elif not preflight.is_over(self.folder):
                raise RunFailedError("the orchestrator was stopped; the same command goes on")
            return
        left = self.orchestrator.sign_off(process, self.described[process.name])
        may_restart = processes.guard_end is None and not gave_up(kind, process, left.was_registered)
        if not may_restart or not self.restarts.has_one_left(process.name):
            raise failure_of(process, left.told() + self.restarts.used_up(process.name))
        cause = cause_of(process)
        why = f" ({cause})" if cause else ""
        self.console.say(f"{process.name} {process.describe_end()}{why}{left.told()}; it is started again")
        again = start(processes, self.described[process.name])
        if kind != "orchestrator":
            return
        url = wait_for_orchestrator(
            processes, again, self.folder, self.interrupts.check, lambda other: self._ended(processes, other)
        )
        self.orchestrator.begin_again(url)

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
        # Scores of the fast ones are not what was asked for, whoever reads only the exit code.
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
    waits = [wait for wait in status.get("waits", []) if wait["who"] != "the end"]
    longest = orchestrator_status.longest_wait({**status, "waits": waits}, LONG_WAIT_S)
    return (
        f"{rollouts.get('evaluated', 0)} rollouts measured, {rollouts.get('failed', 0)} failed, "
        f"{rollouts.get('in_flight', 0)} in flight{rate}{'' if longest is None else f'; {longest}'}"
    )


__all__ = ["Evaluation", "line", "run", "write_configs"]
