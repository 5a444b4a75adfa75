"""What every launcher watches for: signals that ask it to stop, and processes that may be started again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from primerl.config.process_files.files import ProcessConfig
from primerl.launch.placement.protocol import Placement, Process
from primerl.launch.supervise.failures import BAD_INPUT, check_placement
from primerl.process import signals

# The span that `restarts` counts in.
RESTARTS_WITHIN_S = 600.0
# The orchestrator tells trainer and env workers that all is over before it exits itself: who ended well, but longer
# before it, has missed something.
LAST_WORDS_S = 15.0
GOODBYE_S = 3.0
STATUS_EVERY_S = 0.5
TICK_S = 0.1


class Interrupted(Exception):  # noqa: N818 - not an error
    """Ctrl-C, SIGTERM or a closed terminal."""


class Interrupts:
    """Within the block, signals that ask to stop are kept until
    [`check`][primerl.launch.supervise.watching.Interrupts.check]; a Ctrl-C after the first raises KeyboardInterrupt at
    once."""

    def __init__(self, but: Sequence[signal.Signals] = (), also: Callable[[], None] | None = None) -> None:
        """`but`: signals that are left to others. `also`: raises Interrupted for a reason of its own."""
        self._but = but
        self._also = also
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._interrupt)
            for number in signals.stop_signals()
            if number not in self._but
        }
        if signals.is_asked():  # before, and the interrupted code has dropped it
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
        if self._also is not None:
            self._also()


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
        """The message about a process that had none left; empty for another."""
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


def gave_up(kind: str, ended: Process, was_registered: bool) -> bool:
    """Whether it ended by itself, for a reason that another start does not fix. An env worker that has begun to work
    does not: what ends it is an environment's code, in one of the rollouts that it ran."""
    if (ended.code or 0) < 0:
        return False
    return kind != "env-worker" or ended.code in (None, BAD_INPUT) or not was_registered


def rounds(
    placement: Placement, ended: Callable[[Process], None], check: Callable[[], None]
) -> Iterator[tuple[float, bool]]:
    """Every TICK_S, after `ended` was called for what has ended, the time and whether to look at the orchestrator's
    status. `check` raises Interrupted. Raises RunFailedError once the placement has failed."""
    looked = 0.0
    while True:
        for process in placement.watch(TICK_S):
            ended(process)
        check_placement(placement)
        check()
        now = time.monotonic()
        is_due = now - looked >= STATUS_EVERY_S
        if is_due:
            looked = now
        yield now, is_due


def say_goodbye(placement: Placement, described: Mapping[str, ProcessConfig], check: Callable[[], None]) -> None:
    """Env workers have learnt that it is over and end by themselves; engines have to be stopped. `check` may raise,
    to give up sooner."""
    deadline = time.monotonic() + GOODBYE_S
    workers = [process for name, process in placement.by_name.items() if described[name].kind == "env-worker"]
    while time.monotonic() < deadline and not all(process.ended for process in workers):
        check()
        placement.watch(TICK_S)
