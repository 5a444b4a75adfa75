"""SIGTERM, SIGINT and SIGHUP as one exception, so that a stop unwinds through the same clean-up as an error."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class Stopped(BaseException):
    """The process was asked to stop. Not an `Exception`: nothing that handles failures may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the block the first SIGTERM, SIGINT or SIGHUP raises `Stopped` in the main thread; later ones do what they
    do by default, so that a clean-up that hangs can be ended. A SIGHUP that is ignored (`nohup`) stays so. A clean-up
    that fails is logged, and the block still ends by `Stopped`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    stopped: list[Stopped] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_DFL)
        stopped.append(Stopped(number))
        raise stopped[0]

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except Exception as error:
        if not stopped:
            raise
        log.warning("%s: %s, while it was stopped", type(error).__name__, error)
        raise stopped[0] from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
