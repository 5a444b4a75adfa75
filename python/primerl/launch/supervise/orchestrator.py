"""The orchestrator as its launcher sees it: its start, its status, and an end that it reports of a worker."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.evaluation import EvalTimeouts
from primerl.config.schema.rl import RunTimeouts
from primerl.launch.placement.protocol import Placement, Process, machines
from primerl.launch.report import status as orchestrator_status
from primerl.launch.report.logs import tail
from primerl.launch.supervise.failures import RunFailedError, check_placement, failure_of
from primerl.run_key import keep, learn

START_S = 30.0
POLL_S = 0.1
# The orchestrator lives but does not answer: as bad as dead.
ANSWER_S = 20.0
# Rollouts of an env worker that has ended are named so far.
MOST_NAMED = 8


def wait_for_orchestrator(
    placement: Placement,
    process: Process,
    folder: Path,
    check: Callable[[], None] = lambda: None,
    others: Callable[[Process], None] = lambda ended: None,
) -> str | None:
    """The URL, once it listens; None when it says that the run is over. `check` may raise to give up sooner; `others`
    is called with other processes that end."""
    file = folder / "run" / "orchestrator.json"
    limit = machines(placement).start_s
    limit = START_S if limit is None else limit
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        check()
        ended = placement.watch(POLL_S)
        check_placement(placement)
        for other in ended:
            if other is not process:
                others(other)
        if process in ended:
            if process.code == 0:
                return None
            raise failure_of(process)
        with contextlib.suppress(FileNotFoundError):
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["pid"] == process.pid:
                url = str(content["url"])
                keep(folder)
                learn(url, folder)
                return url
    why = ": it was not started" if process.pid is None else ""
    log = tail(placement.logs(process.name), after=process.log_from)
    raise RunFailedError(f"orchestrator did not write {file} within {limit:.0f} s{why}\n{log}".rstrip())


@dataclass(frozen=True)
class Ended:
    """An env worker that has ended, as the orchestrator knew it."""

    was_registered: bool = False
    ran: Sequence[str] = ()

    def told(self) -> str:
        """What it ran when it ended: one of these may be why."""
        if not self.ran:
            return ""
        others = len(self.ran) - MOST_NAMED
        more = f" and {others} others" if others > 0 else ""
        return f"; it ran {', '.join(self.ran[:MOST_NAMED])}{more}"


def signed_off(url: str, ended: Process, config: EnvWorkerConfig, registered: Set[Any] = frozenset()) -> Ended:
    """Has its rollouts handed out again. `registered`: names of workers that are known to have been."""
    name = f"{config.worker_name}:{ended.pid}"
    ran = orchestrator_status.sign_off(url, name, ended.describe_end())
    return Ended(ran is not None or name in registered, ran or ())


def sign_off_earlier(url: str, processes: Iterable[ProcessConfig]) -> None:
    """To be called before these are started: env workers of the same names, of an earlier session, have ended."""
    names = {one.config.worker_name for one in processes if isinstance(one.config, EnvWorkerConfig)}
    orchestrator_status.sign_off_earlier(url, names)


class OrchestratorWatch:
    """The orchestrator, as its launcher sees it. Times are those of `time.monotonic`."""

    def __init__(self, timeouts: RunTimeouts | EvalTimeouts, logs: Path) -> None:
        """`logs`: where its user is sent to look."""
        self.url = ""
        self.status: dict[str, Any] = {}  # its last answer
        self.heard = 0.0  # when that was
        self.is_ready = False  # and all that it needs
        self._timeouts = timeouts
        self._logs = logs
        self._progress = orchestrator_status.Progress()
        self._registered: set[Any] = set()  # env workers that ever were, by the names that they gave

    def begin(self) -> None:
        """Restarts the clocks: workers and engines have to come, or come back."""
        self.heard = self._progress.since = time.monotonic()

    def begin_again(self, url: str | None) -> None:
        """After it was started again; `url` is None where nothing is left to do. Raises RunFailedError where the other
        processes would not find it."""
        if url is not None and url != self.url:
            raise RunFailedError(f"orchestrator was at {self.url}, and that port was taken while it was away")
        self.begin()

    def ask(self, now: float) -> dict[str, Any] | None:
        """The status; None where it did not answer. Raises RunFailedError once it has been silent for too long."""
        status = orchestrator_status.fetch(self.url)
        if status is not None:
            self.heard, self.status = now, status
            self._registered |= {worker.get("name") for worker in status.get("workers", [])}
        elif now - self.heard > ANSWER_S:
            raise RunFailedError(f"orchestrator has not answered {self.url}/status for {now - self.heard:.0f} s")
        return status

    def sign_off(self, ended: Process, described: ProcessConfig) -> Ended:
        """Reports that an env worker has ended and runs no rollouts any more. Returns what is known of it."""
        if not self.url or not isinstance(described.config, EnvWorkerConfig):
            return Ended()
        return signed_off(self.url, ended, described.config, self._registered)

    def ready(self, now: float) -> None:
        """All parts have reported."""
        self.is_ready, self._progress.since = True, now

    def check_start(self, missing: list[str], waited_s: float) -> None:
        """Checks a start that still lacks something. Raises RunFailedError if that takes too long."""
        limit = self._timeouts.start_s
        if waited_s > limit:
            raise RunFailedError(
                f"not everything was ready within timeouts.start_s = {limit:g} s: {'; '.join(missing)} (logs: "
                f"{self._logs}); raise it where the start is only slow"
            )

    def check_progress(self, status: dict[str, Any], now: float) -> None:
        """Raises RunFailedError where nothing has moved for too long."""
        limit = self._timeouts.no_progress_s
        self._check_signal(status, limit)
        if not self._progress.moved(status, now) and now - self._progress.since > limit:
            waiting = "; ".join(orchestrator_status.waits(status)) or "nothing is reported as waiting"
            raise RunFailedError(f"nothing has moved for timeouts.no_progress_s = {limit:.0f} s: {waiting}")

    def postpone(self, now: float) -> None:
        """Nothing can move now, for a reason that has a deadline of its own."""
        self._progress.since = now

    def _check_signal(self, status: dict[str, Any], limit: float) -> None:
        """Rollouts end, and nothing is ever trained. Raises RunFailedError where that lasts."""
        since = status.get("without_signal_s")
        if since is None or since <= limit:
            return
        filtered = [
            f"{one['name']!r} {one['filtered_in_a_row']}"
            for one in status.get("buffer", [])
            if one["filtered_in_a_row"]
        ]
        raise RunFailedError(
            f"no group has had a signal for {since:.0f} s, longer than timeouts.no_progress_s = {limit:g} s, so "
            f"nothing is trained: the rewards of each group were equal (groups in a row: {', '.join(filtered)}). Use "
            "easier or harder examples, a reward in steps instead of all or nothing, a larger orchestrator.group_size "
            "or a higher orchestrator.sampling.temperature; where signals are only rare, raise timeouts.no_progress_s"
        )
