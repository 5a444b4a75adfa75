"""Progress of what takes longer than a few seconds: a bar on a terminal, else a line in the log every few seconds.
Where nobody knows how much is left (`taking`), lines that say for how long it has been going on. Of a training's steps
a bar on a terminal, and for the console line how long the rest will take (`Remaining`)."""

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
"""Steps whose mean time the time that is left is reckoned from."""

Report = Callable[[float, str], None]
"""Takes the share that is done, and what to say beside it (`12,000 rows`)."""


@contextmanager
def progress(doing: str) -> Iterator[Report]:
    """Nothing is shown of what is done within `LINE_INTERVAL_S` where there is no terminal."""
    if _draws():
        with _bar(doing) as report:
            yield report
    else:
        yield _lines(doing)


@contextmanager
def bar(doing: str) -> Iterator[Report]:
    """Of what has lines of its own: a bar on a terminal, and nothing elsewhere."""
    if _draws():
        with _bar(doing) as report:
            yield report
    else:
        yield lambda share, beside: None


@contextmanager
def taking(doing: str) -> Iterator[Callable[[float], None]]:
    """Within the block a line every `LINE_INTERVAL_S`: that it is being done, and for how long. What it gives may be
    told the share that is done."""
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
    """How long a training's other steps will take, from how long its last ones took."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # Steps that were seen to be done, and when. A mean of k steps is between k + 1 of them.
        self._seen: deque[tuple[int, float]] = deque(maxlen=STEPS_TIMED + 1)
        self._has_begun = False

    def seconds(self, step: int, last: int) -> float | None:
        """Once `step` of `last` is done. None where that is not known yet, and when nothing is left."""
        now = self._now()
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()  # gone back to a checkpoint
            self._has_begun = False
        if not self._seen or step > self._seen[-1][0]:
            self._seen.append((step, now))
        if len(self._seen) > 2 and not self._has_begun:
            # What begins takes longer: kernels are chosen, engines fill up. It counts until there is another step.
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
    """A bar is drawn by the thread that has the terminal to itself: others would tear it, as would other ranks' bars of
    the same."""
    leads = os.environ.get("RANK", "0") == "0"
    return leads and sys.stdout.isatty() and threading.current_thread() is threading.main_thread()


def _lines(doing: str) -> Report:
    said_at = time.monotonic()

    def report(share: float, beside: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= LINE_INTERVAL_S:
            said_at = time.monotonic()
            log.info("%s: %.0f %%, %s", doing, 100 * share, beside)

    return report


_display: Progress | None = None
"""All bars that are drawn now: one that is begun within another comes below it."""


@contextmanager
def _bar(doing: str) -> Iterator[Report]:
    with _drawn() as display:
        task = display.add_task(doing, total=1.0, beside="")
        try:
            yield lambda share, beside: display.update(task, completed=share, beside=beside)
        finally:
            display.refresh()  # how it ended, be it at once
            display.remove_task(task)


@contextmanager
def _drawn() -> Iterator[Progress]:
    global _display
    if _display is not None:
        yield _display
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    beside, output = TextColumn("{task.fields[beside]}"), sys.stdout
    with Progress(*columns, beside, transient=True, refresh_per_second=4) as _display:
        try:
            # It has put another stream in place of the terminal, which writes lines above the bars.
            with _logged_to(output, sys.stdout):
                yield _display
        finally:
            _display = None


@contextmanager
def _logged_to(before: TextIO, now: TextIO) -> Iterator[None]:
    """What the log writes to `before` goes to `now`."""
    own = logging.getLogger("primerl").handlers
    handlers = [each for each in own if isinstance(each, logging.StreamHandler) and each.stream is before]
    for handler in handlers:
        handler.setStream(now)
    try:
        yield
    finally:
        for handler in handlers:
            if handler.stream is now:  # not one that has found that nobody reads it
                handler.setStream(before)
