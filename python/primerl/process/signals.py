"""Signals that ask a command to stop: Ctrl-C, SIGTERM, and SIGHUP where its terminal is closed. Standard library only.

A launcher at work and a training handle them themselves (`launch.watching`, `train.stop`). All that comes before and
after, such as checks that have processes of their own, ends as by Ctrl-C: by an exception that closes what is open.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

INTERRUPTED = 130


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, where nothing else handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_signals() -> list[signal.Signals]:
    """What asks this process to stop. A SIGHUP that is ignored stays so: `nohup` and detached runs survive their
    terminal."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def awaited() -> Iterator[Callable[[], object]]:
    """Within the block, what asks this process to stop is kept until the value is called, which waits for it. A thread
    that was made before would take a signal: all that start threads belong in the block."""
    wanted = set(stop_signals())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        yield lambda: signal.sigwait(wanted)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def held(*, second_passes: bool = False) -> Iterator[None]:
    """What asks this process to stop has its effect when the block is done: within `Popen` it would leave a process
    that no one knows of; within an import it leaves half a module, pydantic turns it into another error, or a finalizer
    drops it. `second_passes`: only the first waits, for a block that may hang.

    What ends the process without a handler of Python's ends it here too. Does nothing outside the main thread.
    """
    former: dict[int, Any] = {}
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if came and second_passes:
            former[number](number, frame)
        else:
            came.append(number)

    if threading.current_thread() is threading.main_thread():
        for asked in stop_signals():
            if callable(signal.getsignal(asked)):
                former[asked] = signal.signal(asked, keep)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class AsInterrupts:
    """Within the block, SIGTERM and SIGHUP raise [`Terminated`][primerl.process.signals.Terminated] in the main thread.

    The request is also remembered: an exception that a finalizer or somebody's import drops is raised again by
    [`check`][primerl.process.signals.check], and the command's caller finds it in `number`. Does nothing outside
    the main thread, and does not replace handlers that others have set.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._outer: AsInterrupts | None = None

    def __enter__(self) -> Self:
        global _current
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._stop)
        self._outer, _current = _current, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._outer
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._stop:
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        raise Terminated(number)

    def check(self) -> None:
        if self.number is not None:
            raise Terminated(self.number)


_current: AsInterrupts | None = None


def is_asked() -> bool:
    """Whether the command was asked to stop, before anything had handlers of its own."""
    return _current is not None and _current.number is not None


def has_been_heard() -> None:
    """The command answers the request with an exit code of its own."""
    if _current is not None:
        _current.number = None


def check() -> None:
    """Raises `Terminated` if the command was asked to stop and has not."""
    if _current is not None:
        _current.check()
