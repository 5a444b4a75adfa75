"""What a launcher watches for, whichever processes it has started: signals, deaths, and an orchestrator that is silent,
does not become ready, or moves nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.environment import EnvWorkerConfig
from primerl.config.schema.evaluation import EvalTimeouts
from primerl.config.schema.rl import RunTimeouts
from primerl.launch.report import status as orchestrator_status
from primerl.launch.supervise.processes import Process, Processes
from primerl.launch.supervise.starting import BAD_INPUT, RunFailedError
from primerl.process import signals

# The orchestrator lives but does not answer: as bad as dead.
ORCHESTRATOR_ANSWER_S = 20.0
# The span that `restarts` counts in.
RESTARTS_WITHIN_S = 600.0
# The orchestrator tells trainer and env workers that all is over before it exits itself: who ended well, but longer
# before it, has missed something.
LAST_WORDS_S = 15.0
GOODBYE_S = 3.0
# Rollouts of an env worker that has ended are named so far.
MOST_NAMED = 8
STATUS_EVERY_S = 0.5
TICK_S = 0.1


class Interrupted(Exception):  # noqa: N818 - not an error
    """Ctrl-C, SIGTERM or a closed terminal."""


class Interrupts:
    """Within the block, signals that ask to stop are kept until
    [`check`][primerl.launch.supervise.watching.Interrupts.check]; a Ctrl-C after the first raises KeyboardInterrupt at
    once."""

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._interrupt) for number in signals.stop_signals()}
        if signals.is_asked():  # before, and whoever was interrupted has dropped it
            self._count += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises Interrupted."""
        if self._count:
            raise Interrupted


class Restarts:
    """How often each process may still be started again."""

    def __init__(self, most: int, key: str | None = "restarts") -> None:
        """`most`: within RESTARTS_WITHIN_S, of each process. `key`: of the config, where it is one."""
        self._most = most
        self._key = key
        self._ends: dict[str, list[float]] = {}  # when

    def has_one_left(self, name: str) -> bool:
        """Counts one."""
        now = time.monotonic()
        lately = [at for at in self._ends.get(name, []) if now - at < RESTARTS_WITHIN_S]
        self._ends[name] = [*lately, now]
        return len(lately) < self._most

    def used_up(self, name: str) -> str:
        """What is to be said of a process that had none left; nothing of another."""
        ends = len(self._ends.get(name, []))
        if ends <= self._most:
            return ""
        most = f"`{self._key}` = {self._most}" if self._key else f"{self._most} times"
        if not self._most:
            return f", and {most} does not allow to start it again"
        return (
            f", and was started again {self._most} times within {RESTARTS_WITHIN_S / 60:.0f} minutes, as often as "
            f"{'is done' if self._key is None else most + ' allows'}"
        )


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


def gave_up(kind: str, ended: Process, was_registered: bool) -> bool:
    """Whether it ended by itself, for a reason that another start does not mend. An env worker that has begun to work
    does not: what ends it is an environment's code, in one of the rollouts that it ran."""
    if (ended.code or 0) < 0:
        return False
    return kind != "env-worker" or ended.code in (None, BAD_INPUT) or not was_registered


class OrchestratorWatch:
    """The orchestrator, as its launcher sees it. Times are those of `time.monotonic`."""

    def __init__(self, timeouts: RunTimeouts | EvalTimeouts, logs: Path) -> None:
        """`logs`: where its user is sent to look."""
        self.url = ""
        self.heard = 0.0  # when it last answered
        self.is_ready = False  # and all that it needs
        self._timeouts = timeouts
        self._logs = logs
        self._progress = orchestrator_status.Progress()
        self._registered: set[Any] = set()  # env workers that ever were, by the names that they gave

    def begin(self) -> None:
        """Clocks begin anew: workers and engines have to come, or come back."""
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
            self.heard = now
            self._registered |= {worker.get("name") for worker in status.get("workers", [])}
        elif now - self.heard > ORCHESTRATOR_ANSWER_S:
            raise RunFailedError(f"orchestrator has not answered {self.url}/status for {now - self.heard:.0f} s")
        return status

    def sign_off(self, ended: Process, described: ProcessConfig) -> Ended:
        """Of an env worker: it has no rollouts any more. Returns what is known of it."""
        if not self.url or not isinstance(described.config, EnvWorkerConfig):
            return Ended()
        return signed_off(self.url, ended, described.config, self._registered)

    def ready(self, now: float) -> None:
        """All parts have reported."""
        self.is_ready, self._progress.since = True, now

    def check_start(self, missing: list[str], waited_s: float) -> None:
        """Of a start that still lacks something. Raises RunFailedError where that takes too long."""
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


def say_goodbye(processes: Processes, described: Mapping[str, ProcessConfig], check: Callable[[], None]) -> None:
    """Env workers have been told that it is over and end by themselves; engines have to be stopped. `check` may raise,
    to give up sooner."""
    deadline = time.monotonic() + GOODBYE_S
    workers = [process for name, process in processes.by_name.items() if described[name].kind == "env-worker"]
    while time.monotonic() < deadline and not all(process.ended for process in workers):
        check()
        processes.poll(TICK_S)
