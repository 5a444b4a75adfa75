"""Progress of what takes longer than a few seconds: a bar on a terminal, else a line in the log every few seconds.
Where nobody knows how much is left (`taking`), lines that say for how long it has been going on."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 5.0

Report = Callable[[float, str], None]
"""Takes the share that is done, and what to say beside it (`12,000 rows`)."""


@contextmanager
def progress(doing: str) -> Iterator[Report]:
    """Nothing is shown of what is done within `LINE_INTERVAL_S` where there is no terminal."""
    # A bar is drawn by the thread that has the terminal to itself: others' lines would tear it, as would other ranks'
    # bars of the same.
    leads = os.environ.get("RANK", "0") == "0"
    if leads and sys.stdout.isatty() and threading.current_thread() is threading.main_thread():
        with _bar(doing) as report:
            yield report
    else:
        yield _lines(doing)


@contextmanager
def taking(doing: str) -> Iterator[None]:
    """Within the block a line every `LINE_INTERVAL_S`: that it is being done, and for how long."""
    over, began_at = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(LINE_INTERVAL_S):
            log.info("%s: for %.0f s", doing, time.monotonic() - began_at)

    thread = threading.Thread(target=say, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _lines(doing: str) -> Report:
    said_at = time.monotonic()

    def report(share: float, beside: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= LINE_INTERVAL_S:
            said_at = time.monotonic()
            log.info("%s: %.0f %%, %s", doing, 100 * share, beside)

    return report


@contextmanager
def _bar(doing: str) -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[beside]}"), transient=True) as bar:
        task = bar.add_task(doing, total=1.0, beside="")
        yield lambda share, beside: bar.update(task, completed=share, beside=beside)
