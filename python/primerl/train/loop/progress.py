"""Shows progress of what takes longer than a few seconds: a bar on a terminal, else lines in the log.

`progress` knows the share that is done; `taking` logs for how long something has been running; `bar` shows a bar only
on a terminal, next to lines of its own; `Remaining` estimates how long the remaining steps take.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 5.0
STEPS_TIMED = 50
"""Number of last steps whose mean time estimates the remaining time."""

Report = Callable[[float, str], None]
"""Called with the share that is done and a detail (`12,000 rows`)."""


@contextmanager
def progress(doing: str) -> Iterator[Report]:
    """Without a terminal, nothing is shown for work that takes less than `LINE_INTERVAL_S`."""
    if _draws():
        with _bar(doing) as report:
            yield report
    else:
        yield _lines(doing)


@contextmanager
def bar(doing: str) -> Iterator[Report]:
    """For work with log lines of its own: a bar on a terminal, nothing elsewhere."""
    if _draws():
        with _bar(doing) as report:
            yield report
    else:
        yield lambda share, detail: None


@contextmanager
def taking(doing: str) -> Iterator[Callable[[float], None]]:
    """Within the block, log every `LINE_INTERVAL_S` for how long it has been running. The value may be called with the
    share that is done."""
    over, began_at = threading.Event(), time.monotonic()
    known: float | None = None

    def tell(share: float) -> None:
        nonlocal known
        known = share

    def say() -> None:
        while not over.wait(LINE_INTERVAL_S):
            share = "" if known is None else f"{100 * known:.0f} %, "
            log.info("%s: %sfor %.0f s", doing, share, time.monotonic() - began_at)

    thread = threading.Thread(target=say, name="progress", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        over.set()
        thread.join()


class Remaining:
    """Estimates how long the remaining steps take, from the last ones."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # Finished steps and when they finished. The mean of k steps needs k + 1 of them.
        self._seen: deque[tuple[int, float]] = deque(maxlen=STEPS_TIMED + 1)
        self._has_begun = False

    def seconds(self, step: int, last: int) -> float | None:
        """Remaining seconds once `step` of `last` is done; None if unknown, or if nothing is left."""
        now = self._now()
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()  # gone back to a checkpoint
            self._has_begun = False
        if not self._seen or step > self._seen[-1][0]:
            self._seen.append((step, now))
        if len(self._seen) > 2 and not self._has_begun:
            # The first step takes longer: kernels are chosen, engines fill up. It counts until there is another.
            self._seen.popleft()
            self._has_begun = True
        (first, began), (_, ended) = self._seen[0], self._seen[-1]
        if step == first or not first or step >= last:
            return None  # before the first step models are loaded
        each = (ended - began) / (step - first)
        return (last - step) * each - min(now - ended, each)


def duration(seconds: float) -> str:
    """`3:07`, `12:03:07`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _draws() -> bool:
    """Only the main thread of the leading rank draws a bar: others would garble the terminal."""
    leads = os.environ.get("RANK", "0") == "0"
    return leads and sys.stdout.isatty() and threading.current_thread() is threading.main_thread()


def _lines(doing: str) -> Report:
    said_at = time.monotonic()

    def report(share: float, detail: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= LINE_INTERVAL_S:
            said_at = time.monotonic()
            log.info("%s: %.0f %%, %s", doing, 100 * share, detail)

    return report


_display: Progress | None = None
"""All bars on the terminal: a nested one is drawn below the outer one."""


@contextmanager
def _bar(doing: str) -> Iterator[Report]:
    with _drawn() as display:
        task = display.add_task(doing, total=1.0, detail="")
        try:
            yield lambda share, detail: display.update(task, completed=share, detail=detail)
        finally:
            display.refresh()  # show the final state, even of short work
            display.remove_task(task)


@contextmanager
def _drawn() -> Iterator[Progress]:
    global _display
    if _display is not None:
        yield _display
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    detail, output = TextColumn("{task.fields[detail]}"), sys.stdout
    with Progress(*columns, detail, transient=True, refresh_per_second=4) as _display:
        try:
            # rich has replaced the terminal by a stream that writes lines above the bars.
            with _logged_to(output, sys.stdout):
                yield _display
        finally:
            _display = None


@contextmanager
def _logged_to(before: TextIO, now: TextIO) -> Iterator[None]:
    """Redirect log handlers from the stream `before` to `now`."""
    own = logging.getLogger("primerl").handlers
    handlers = [each for each in own if isinstance(each, logging.StreamHandler) and each.stream is before]
    for handler in handlers:
        handler.setStream(now)
    try:
        yield
    finally:
        for handler in handlers:
            if handler.stream is now:  # not one that was replaced because no one reads it
                handler.setStream(before)
