"""How training ends early: asked to by a signal, or because a step's numbers are not finite.

SIGTERM, SIGINT and SIGHUP become one exception, so that a stop unwinds through the same clean-up as an error. A step
that is not finite ends the run; the message names what it trained on, and the batch is kept for inspection.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from primerl.train.checkpoint.files import whole_folder

log = logging.getLogger(__name__)

MOST_LISTED = 32
"""Names in a message; the rest are counted."""


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


class TrainingDiverged(Exception):  # noqa: N818 (what happened)
    """Loss, gradient or weights are not finite. The message names the step and, where they matter, what it trained."""


def listed(names: Iterable[object], separator: str = ", ") -> str:
    """`1, 2, 3 and 4 more`."""
    every = [str(name) for name in names]
    rest = f" and {len(every) - MOST_LISTED} more" if len(every) > MOST_LISTED else ""
    return separator.join(every[:MOST_LISTED]) + rest


def keep_batch(output_dir: Path, step: int, rank: int, file: str, content: bytes | bytearray) -> str:
    """Writes the batch of this rank to `<output_dir>/diverged`; returns where it is, or why it could not be written."""
    folder = output_dir / "diverged" / f"step_{step}_rank_{rank}"
    try:
        with whole_folder(folder, replace=True) as new:
            (new / file).write_bytes(content)
    except OSError as error:
        return f"the batch could not be kept: {error}"
    return f"the batch is in {folder / file}"
