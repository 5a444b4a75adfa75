"""`import primerl`: the orchestrator in your process, the training loop yours.

    with primerl.Run("rl.toml") as run:
        for batch in run.batches():      # packed micro-batches of torch tensors, step after step
            ...                          # your forward, loss, backward, optimizer step
            run.publish(model)           # policy v(k-1) has become v(k); engines load it

A script that saves checkpoints (`run.save`) and is started again in the same output_dir loads the newest one
(`run.restore`), and publishes its weights: it gets the batches after that step. `primerl.connect` gives the same to a
script in a process of its own.

The file is the one of `primerl rl`; its `[trainer]` section is not used, but for `weights`. Inference engines and env
workers are processes of their own, watched and never left behind. A process that fails ends the run: `batches()` raises
with its name and the end of its log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from primerl._core import PrimerlError
from primerl.config.errors.fail import ConfigError
from primerl.config.errors.validation_errors import describe
from primerl.config.hosted.load_run import load_run
from primerl.config.process_files import files, resolve, run_file
from primerl.config.schema.deployment import on_ray
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.trainer import AdaptedModel
from primerl.forking import preload, servers
from primerl.launch import cluster, configs
from primerl.launch.interpreters import lookup
from primerl.launch.placement import gpus
from primerl.launch.placement.commands import start
from primerl.launch.placement.registry import chosen
from primerl.launch.preflight import checker, hub, output_folder, training
from primerl.launch.registration import registered
from primerl.launch.report import summary
from primerl.launch.report.logs import describe_end
from primerl.launch.report.status import finished
from primerl.launch.resume import going_back
from primerl.launch.supervise.failures import BAD_INPUT, FAILED, RefusedError, RunFailedError, check_placement
from primerl.launch.supervise.orchestrator import sign_off_earlier
from primerl.own_trainer.connection import Connection, connect
from primerl.own_trainer.errors import plainly
from primerl.own_trainer.lifetime import Lifetime
from primerl.own_trainer.loop import TrainingLoop
from primerl.own_trainer.outcome import is_orderly, outcome
from primerl.process.redaction import redact
from primerl.run_key import learn
from primerl.runs import state
from primerl.runs.registry import SCRIPT
from primerl.train.data.batch import Batch, MicroBatch, decode_batch

if TYPE_CHECKING:
    from primerl._core import Orchestrator

__all__ = ["Batch", "Connection", "MicroBatch", "Run", "RunFailedError", "connect"]

log = logging.getLogger("primerl")

WATCH_EVERY_S = 0.2
# Beyond the evaluation's own deadline: the last weights have to be loaded and proved first.
FINISH_S = 60.0
NOT_ENTERED = "this run has not been started: use it as `with primerl.Run(...) as run:`"
ENTERED = (
    "a primerl.Run is for one `with` block, and this one has had its own: make a new one, as `with primerl.Run(...) as "
    "run:` does each time; in the same output_dir it resumes from what run.save has saved"
)


class Run(TrainingLoop):
    """One run with your own trainer. Use as a context manager."""

    @plainly
    def __init__(self, config: str | Path | Mapping[str, Any] | RLConfig, *overrides: str) -> None:
        """
        Args:
            config: TOML file (as for `primerl rl`, in either form), or the keys of the full form as a mapping.
            overrides: as on the command line, for example `"--max-steps", "5"`; only with a file.

        Raises:
            ConfigError: a key is unknown, missing or out of bounds; the message names it.
        """
        if isinstance(config, str | Path):
            self.config = load_run(["@", os.fspath(config), *overrides], program="primerl.Run")
        elif isinstance(config, RLConfig):
            self.config = config
        else:
            try:
                self.config = RLConfig.model_validate(dict(config))
            except ValidationError as error:
                raise ConfigError(describe(error, RLConfig)) from None
        self.config = run_file.located(self.config)
        remark = state.within_run(self.config.output_dir)
        if remark is not None:
            warnings.warn(remark, stacklevel=2)
        # Your loop trains what it likes: engines are sent whole weights.
        trainer = self.config.trainer.model_copy(update={"model": AdaptedModel()})
        self.config = self.config.model_copy(update={"trainer": trainer})
        if self.config.trainer.ranks != 1:
            raise ConfigError.at(
                "trainer.ranks",
                "a run in the script's own process has one rank, which gets whole batches; for several, "
                "start it with `primerl rl ... --trainer external`, and the script by torchrun, with primerl.connect",
            )
        if self.config.checkpoint_id is not None:
            raise ConfigError.at(
                "checkpoint_id", "a training script begins from the model that it loads; give its folder as model.path"
            )
        for name in ("store", "wandb", "monitors"):
            if name in self.config.model_fields_set and getattr(self.config, name):
                warnings.warn(
                    f"{name} is ignored: only `primerl rl` acts on it. A training script uploads and reports by itself",
                    stacklevel=2,
                )
        self.config = hub.with_model(self.config)
        weights, ckpt = self.config.trainer.weights, self.config.trainer.ckpt
        if ckpt is not None and ckpt.goes_back_to is not None:
            raise ConfigError.at(
                "ckpt.resume_step",
                "a run in the script's own process resumes from the newest checkpoint; start it with "
                "`primerl rl ... --trainer external --ckpt.resume-step N`, and the script with primerl.connect",
            )
        if weights.transport != "files":
            raise ConfigError.at("trainer.weights.transport", "a training script publishes files; omit it")
        super().__init__(
            Path(files.absolute(self.config.output_dir)),
            files.absolute(self.config.model.path),
            self.config.max_steps,
            weights,
            ckpt,
            lifetime=Lifetime(NOT_ENTERED, ENTERED),
            keep_all=weights.keep_all or self.config.keep_broadcasts,
            trusted=self.config.model.trust_remote_code,
        )
        self._started: Orchestrator | None = None
        self._failure: str | None = None
        self._leaving = threading.Event()
        self._resources = contextlib.ExitStack()

    @plainly
    def __enter__(self) -> Self:
        """Checks everything, then starts the orchestrator, engines and env workers.

        Raises:
            ConfigError: the input cannot be used; nothing was started.
            RuntimeError: it was entered before.
        """
        from primerl._core import Orchestrator

        self._lifetime.check_new()
        if self.config.dry_run:
            raise ConfigError.at(
                "dry_run", "a training script starts its run; use `primerl rl ... --dry-run` to check a file"
            )
        if on_ray(self.config.deployment, self.config.ray) is not None:
            raise ConfigError.at("ray", "a training script starts its processes on this machine; omit it")
        with contextlib.ExitStack() as resources:
            # Also for the check, which imports environments as their workers do.
            resources.enter_context(checker.environments_ahead(fork=self.config.fork_server))
            placement = chosen(self.config.deployment)
            self.config = cluster.placed(self.config, placement)
            variables = training.check(self.config, placement=placement)
            servers.begin(self.config.fork_server, preload.TORCH)
            self._began = time.monotonic()
            clean = self.config.clean_output_dir
            folder = resources.enter_context(output_folder.claimed(self.config.output_dir, clean=clean, kind="rl"))
            # In the list like any other run: the dashboard, `primerl run compare` and `primerl run stop` find it.
            goes_on = not clean and output_folder.begun_in(folder)
            self._session = resources.enter_context(
                registered(self.config, folder, log.warning, goes_on=goes_on, form=SCRIPT)
            )
            # Until everything has started: what is refused leaves the run as it was noted before.
            self._session.exit_code = BAD_INPUT
            resources.callback(self._close_metrics)
            described = resolve.orchestrator(self.config, own_trainer=True)
            files.write(described)
            settings = described.config.model_dump(mode="json", exclude_none=True)
            self._started = resources.enter_context(Orchestrator(settings))
            self._orchestrator.start()
            learn(self._orchestrator.url, folder)
            self._sampled_before = summary.sampled_before(status := self.status())
            try:
                going_back.check_steps(self.config, status)
            except RefusedError as refusal:
                raise ConfigError.like(refusal) from None
            if finished(self.status()):
                raise ConfigError.at(
                    "max_steps",
                    f"nothing is left to do: the run in {folder} has trained all {self.config.max_steps} "
                    "steps; set more of them, or give another output_dir",
                )
            self._placement = resources.enter_context(placement)
            try:
                cluster.prepare(placement, folder, log.warning, lambda: None)
            except RefusedError as refusal:
                raise ConfigError.like(refusal) from None
            url = self._orchestrator.url
            self._kinds: dict[str, str] = {}
            processes = [*resolve.inference(self.config, url), *resolve.env_workers(self.config, url)]
            sign_off_earlier(url, processes)
            for process in processes:
                files.write(process)
                self._kinds[process.name] = process.kind
                start(self._placement, lookup.equipped(configs.entries(self.config), process, variables))
            self._watcher = threading.Thread(target=self._watch, name="primerl-watch", daemon=True)
            self._watcher.start()
            self._resources = resources.pop_all()
            self._lifetime.begin()
        self._session.exit_code, self._session.has_begun = FAILED, True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._lifetime.is_here:
            return
        try:
            if is_orderly(error) and self._failure is None:
                self._finish()
        finally:
            self._lifetime.end()
            # From here on an engine or worker that ends is no failure.
            self._leaving.set()
            self._watcher.join()
            status: dict[str, Any] = {}
            with contextlib.suppress(PrimerlError):
                status = self.status()
            self._orchestrator.shutdown("the training script has ended")
            self._placement.stop(grace_s=self.config.timeouts.stop_s)
            self._note_end(sys.exception() or error, status)
            self._resources.close()

    def publish(self, model: Any, metrics: Mapping[str, float] | None = None) -> int:
        self._check()
        return super().publish(model, metrics)

    def status(self) -> dict[str, Any]:
        """What every part is doing and waiting for (`GET /status`)."""
        return dict(self._orchestrator.status())

    @property
    def url(self) -> str:
        """Where the orchestrator listens."""
        return str(self._orchestrator.url)

    @property
    def _orchestrator(self) -> Orchestrator:
        if self._started is None:
            raise RuntimeError(NOT_ENTERED)
        return self._started

    @property
    def _dtype(self) -> str:
        return self.config.trainer.dtype or "float32"

    def _take(self, step: int) -> Batch | None:
        with self._named():
            body = self._orchestrator.next_batch(step, 0)
        self._check()
        return None if body is None else decode_batch(body)

    def _announce(self, version: int, manifest: Path, model: Any) -> None:
        with self._named():
            self._orchestrator.publish_weights(version, os.fspath(manifest.resolve()))

    def _resume(self, step: int) -> None:
        with self._named():
            self._orchestrator.resume_after(step)

    def _report_saved(self, oldest: int, saved: int | None) -> None:
        with self._named():
            self._orchestrator.checkpoint_saved(oldest, saved)

    def _finish(self) -> None:
        """Waits for the last evaluation, when all steps were trained."""
        if self._next_version <= self.config.max_steps:
            return
        deadline = time.monotonic() + FINISH_S
        while not finished(status := self.status()):
            self._check()
            if status.get("running_evaluations"):
                # One of which nothing comes is closed by its own timeouts.
                deadline = time.monotonic() + FINISH_S
            if time.monotonic() > deadline:
                raise RunFailedError(f"the last evaluation did not begin in time: {status.get('waits')}")
            self._leaving.wait(WATCH_EVERY_S)

    def _note_end(self, error: BaseException | None, status: dict[str, Any]) -> None:
        """In the list of runs and in `run/summary.json`, as a launcher does."""
        step = self._next_version
        code, reason = outcome(error, self._failure, step if step <= self.max_steps else None)
        self._session.exit_code = code
        processes = [(self._kinds[name], process) for name, process in self._placement.by_name.items()]
        content = summary.contents(
            code,
            reason,
            began=self._began,
            training_began=self._began,
            processes=processes,
            gpus=len(gpus.found()),
            before=self._sampled_before,
            status=status,
        )
        try:
            summary.write(self.output_dir, content, has_run=True)
        except OSError as problem:
            log.warning("%s was not written: %s", self.output_dir / summary.FILE, problem)

    def _check(self) -> None:
        if self._failure is not None:
            raise RunFailedError(self._failure)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """A call that ends because a process failed raises what failed, not that the run is over."""
        try:
            yield
        except Exception:
            self._check()
            raise

    def _watch(self) -> None:
        """In a thread of its own, which alone talks to the guard until the run is being left."""
        while not self._leaving.is_set():
            ended = self._placement.watch(WATCH_EVERY_S)
            servers.tell_lost(log.warning)
            try:
                check_placement(self._placement)
            except RunFailedError as failure:
                self._fail(str(failure))
                return
            for process in ended:
                if not (process.code == 0 and finished(self.status())):
                    self._fail(describe_end(process))
                    return

    def _fail(self, reason: str) -> None:
        if self._leaving.is_set():
            return
        self._failure = reason = redact(reason)
        # Wakes a thread that waits for a batch.
        self._orchestrator.shutdown(reason)
