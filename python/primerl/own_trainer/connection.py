"""`primerl.connect`: a training script in a process of its own, for a run that `primerl rl @ f --trainer external`
started without a trainer.

The launcher watches the run; the script may end, be killed and be started again while it waits.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import stat
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from primerl.launch.report.status import fetch
from primerl.launch.report.summary import FILE as SUMMARY
from primerl.launch.supervise.failures import RunFailedError
from primerl.launch.supervise.lock import in_use
from primerl.own_trainer.errors import plainly
from primerl.own_trainer.lifetime import Lifetime
from primerl.own_trainer.loop import TrainingLoop, counts
from primerl.own_trainer.outcome import is_orderly
from primerl.own_trainer.peers import Peers
from primerl.process.setting_checks import from_mapping
from primerl.run_key import learn
from primerl.train.data.batch import Batch, BatchError
from primerl.train.loop.batches import Batches
from primerl.train.loop.client import (
    BatchTimeout,
    Heartbeat,
    ManifestRefused,
    NoMoreBatches,
    OrchestratorClient,
    OrchestratorError,
    PublishAgain,
    own_identity,
)
from primerl.train.settings import TrainerConfig

log = logging.getLogger("primerl")

ADDRESS = Path("run") / "orchestrator.json"
POLL_S = 0.5
REMIND_S = 30.0
THERE, OVER, AGAIN = "there", "over", "again"
"""What a rank got when it asked for a batch."""
CLOSED = "this connection is closed: call primerl.connect again"
Value = TypeVar("Value")


@plainly
def connect(output_dir: str | os.PathLike[str], *, wait_s: float = 600.0) -> Connection:
    """The run in `output_dir`, for which this process trains. Waits up to `wait_s` seconds until it listens, so that
    script and run may be started in either order.

    If `torchrun` starts the script as several ranks, as many as `trainer.ranks` says, each one connects and gets its
    part of every batch.

    Raises:
        RunFailedError: no run without a trainer listens there; it has another trainer, which is named; it is for
            another number of ranks.
    """
    settings = _found(Path(output_dir).expanduser().absolute(), wait_s)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != settings.ranks:
        raise RunFailedError(
            f"this script has {_ranks(size)}, and the run packs its batches for trainer.ranks = {settings.ranks}: "
            f"start the script as `torchrun --nproc-per-node {settings.ranks} SCRIPT`, or the run with "
            f"--trainer.ranks {size}"
        )
    return Connection(settings, Peers.join())


class Connection(TrainingLoop):
    """One run, as its trainer sees it; see `connect`. A context manager: leaving it says goodbye."""

    def __init__(self, settings: TrainerConfig, peers: Peers) -> None:
        self._settings, self._peers = settings, peers
        super().__init__(
            Path(settings.output_dir),
            settings.model.path,
            settings.max_steps,
            settings.weights,
            settings.ckpt,
            lifetime=Lifetime(CLOSED, CLOSED),
            keep_all=settings.weights.keep_all,
            trusted=settings.model.trust_remote_code,
        )
        self._client = OrchestratorClient(settings.orchestrator_url, settings.orchestrator_timeout_s)
        identity: dict[str, object] = self._together("registering for the run", self._begin)
        self._client.identity = identity
        self._fetched = Batches(self._client, peers.rank, peers.size)
        self._heartbeat = Heartbeat(settings.orchestrator_url, active=peers.leads, identity=identity)
        self._published_model: Any = None
        self._sums = (0, 0)
        """Samples and tokens of the batch, over all ranks."""
        self._published_again: int | None = None
        self._lifetime.begin()
        self.doing("preparing")

    def _begin(self) -> dict[str, object]:
        identity = own_identity()
        try:
            self._client.begin(identity)
        except OrchestratorError as error:
            self._client.close()
            raise RunFailedError(str(error)) from None
        return identity

    @property
    def rank(self) -> int:
        """Number of this process among those of the script; 0 publishes and saves."""
        return self._peers.rank

    @property
    def ranks(self) -> int:
        """How many there are. `Batch.loss_tokens` is of all of them, so gradients are to be summed: multiply the loss
        by this number where a library takes their mean, as DDP does."""
        return self._peers.size

    def _together(self, name: str, do: Callable[[], Value]) -> Value:
        return self._peers.agree(name, do)

    @property
    def url(self) -> str:
        """Where the orchestrator listens."""
        return self._client.url

    def status(self) -> dict[str, Any]:
        """What every part is doing and waiting for (`GET /status`); empty if the orchestrator does not answer."""
        return fetch(self.url) or {}

    def doing(self, what: str) -> None:
        """Reports what this process does from now on: the run's page shows it, and so does the message about a script
        that has fallen silent. The methods of this class report themselves; call it before work that takes minutes."""
        self._heartbeat.doing(self._next_version, what)
        self._peers.at(f"{what}, after policy {self._next_version - 1}")

    def close(self) -> None:
        """Says goodbye: the silence of this script is no failure from now on."""
        self._close(orderly=True)

    def _close(self, *, orderly: bool) -> None:
        if not self._lifetime.is_here:
            return
        self._lifetime.end()
        self._heartbeat.leave()
        self._heartbeat.close()
        self._fetched.close()
        self._client.close()
        self._close_metrics()
        self._peers.leave(orderly=orderly)

    def __enter__(self) -> Self:
        self._lifetime.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        named = None if error is None else self._peers.named(error)
        self._close(orderly=is_orderly(error))
        if named is not None:
            raise named from error

    @property
    def _dtype(self) -> str:
        return self._settings.dtype or "float32"

    def _take(self, step: int) -> Batch | None:
        said = time.monotonic()

        def waiting(reason: str) -> None:
            nonlocal said
            self.doing(f"waiting for {reason}")
            if time.monotonic() - said > REMIND_S:
                said = time.monotonic()
                log.info("step %d: waiting for %s", step, reason)

        self.doing("waiting for a batch")
        attempt = 0
        while True:
            batch, why = self._ask(step, waiting)
            # When a run is stopped, or no engine can load a policy, some ranks may have their batch already.
            outcome = THERE if batch is not None else OVER if why is None else AGAIN
            own = (0, 0) if batch is None else counts(batch)
            told = self._peers.all_of(f"batch of step {step}, attempt {attempt}", json.dumps([outcome, *own]))
            outcomes, samples, tokens = zip(*(json.loads(one) for one in told), strict=True)
            self._sums = (sum(samples), sum(tokens))
            attempt += 1
            if AGAIN in outcomes:
                self._publish_again(step - 1, why or "another rank got that answer")
                continue
            if OVER in outcomes:
                why = (self.status().get("run") or {}).get("finished") or "its launcher's output says why"
                raise RunFailedError(f"the run has ended before step {step} of {self.max_steps}: {why}")
            self.doing("training")
            if step < self.max_steps:
                self._fetched.ask_ahead(step + 1)
            return batch

    def _counts(self, batch: Batch) -> tuple[int, int]:
        return self._sums

    def _ask(self, step: int, waiting: Callable[[str], None]) -> tuple[Batch | None, str | None]:
        """The batch; without one, why the last policy is to be published again, or None: there are no more."""
        try:
            return self._fetched.take(step, self._settings.batch_timeout_s, waiting).batch, None
        except NoMoreBatches:
            return None, None
        except PublishAgain as asked:
            return None, str(asked)
        except OrchestratorError as error:
            raise self._failed(error) from None
        except (BatchTimeout, BatchError) as error:
            raise RunFailedError(str(error)) from None

    def _publish_again(self, version: int, why: str) -> None:
        if self._published_again == version:
            raise RunFailedError(f"no engine can load policy {version}, though its weights were written again: {why}")
        self._published_again = version
        log.warning("no engine can load policy %d, its weights are written again: %s", version, why)

        def again() -> None:
            self._announce(version, self._publisher.publish(self._published_model, version), self._published_model)

        self._together(f"publishing policy {version} again", again)

    def _announce(self, version: int, manifest: Path, model: Any) -> None:
        self._published_model = model
        try:
            self._client.weights(version, os.fspath(manifest.resolve()))
        except NoMoreBatches:
            log.info("policy %d: the run is over", version)
        except ManifestRefused as error:
            raise RunFailedError(f"the weights of policy {version} were not accepted: {error}") from None
        except OrchestratorError as error:
            raise self._failed(error) from None
        self.doing("published")

    def _failed(self, error: OrchestratorError) -> RunFailedError:
        """With what is known of the run, if its launcher is gone."""
        why = absence(self.output_dir, str(error))
        return RunFailedError(why if why == str(error) else f"{why}: {error}")

    def _resume(self, step: int) -> None:
        try:
            self._client.resume(step)
        except OrchestratorError as error:
            raise self._failed(error) from None

    def _report_saved(self, oldest: int, saved: int | None) -> None:
        self._client.checkpoint(oldest, saved)


def _found(folder: Path, wait_s: float) -> TrainerConfig:
    """What the run's trainer has to know, once the run listens."""
    deadline, said, last = time.monotonic() + wait_s, "", -REMIND_S
    while True:
        problem = None
        url = _listens_at(folder)
        if url is not None:
            learn(url, folder)
            settings = _settings(folder)
            # An earlier start has left the file, until the launcher writes it again.
            if settings is not None and settings.orchestrator_url == url:
                if fetch(url) is not None:
                    _check_is_without_trainer(folder)
                    return settings
                problem = f"the orchestrator of {folder} does not answer at {url}"
        problem = absence(folder, problem)
        now = time.monotonic()
        if now > deadline:
            raise RunFailedError(
                f"{problem}{_meant(folder)}, after {wait_s:g} s of waiting; start it with `primerl rl @ FILE --trainer "
                f"external --output-dir {folder}`"
            )
        if problem != said or now - last > REMIND_S:
            said, last = problem, now
            left = deadline - now
            log.warning("%s%s: waiting for it to be started, for at most %.0f s", problem, _meant(folder), left)
        time.sleep(POLL_S)


def absence(folder: Path, problem: str | None = None) -> str:
    """In words, why no run listens in the folder; `problem` where its launcher is there."""
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            return f"{folder} is no folder"
    except PermissionError as error:
        return f"{folder} cannot be looked at ({error.strerror})"
    except OSError:
        return f"there is no folder {folder}"
    with contextlib.suppress(OSError):
        if in_use(folder):
            return problem or f"the run in {folder} does not listen yet"
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        code, reason = summary["exit_code"], str(summary["reason"]).strip().partition("\n")[0]
        is_older = _written(folder / SUMMARY) < _written(folder / ADDRESS)
    except (OSError, ValueError, LookupError, TypeError):
        is_older = True
    if is_older:  # of an earlier session: a launcher on another machine may have begun one
        return problem or f"no run listens in {folder}"
    over = "has trained all its steps" if code == 0 else f"has ended ({reason})"
    return f"the run in {folder} {over}{'; it needs a larger --max-steps' if code == 0 else ''}"


def _meant(folder: Path) -> str:
    """Folders by a name like that of one that is not there. It looks at all folders next to it."""
    with contextlib.suppress(OSError):
        if not folder.exists():
            siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()]
            near = difflib.get_close_matches(folder.name, siblings, n=3)
            return f" (did you mean {', '.join(str(folder.parent / name) for name in near)}?)" if near else ""
    return ""


def _written(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _check_is_without_trainer(folder: Path) -> None:
    run = tomllib.loads((folder / "configs" / "rl.toml").read_text(encoding="utf-8"))
    if not run.get("trainer", {}).get("external"):
        raise RunFailedError(
            f"the run in {folder} has a trainer of its own; start it with `--trainer external` to train by a script"
        )


def _listens_at(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _settings(folder: Path) -> TrainerConfig | None:
    file = folder / "configs" / "trainer.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return from_mapping(TrainerConfig, content)


def _ranks(size: int) -> str:
    return "one process" if size == 1 else f"{size} ranks (WORLD_SIZE)"
