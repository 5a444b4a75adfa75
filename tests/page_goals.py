"""What the benches of pages share: goals, and a tab of a browser."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import browser


class Measured:
    def __init__(self) -> None:
        self.held = True
        """Whether every goal so far was reached."""

    def goal(self, name: str, value: float, most: float, unit: str) -> None:
        self.held &= value <= most
        print(f"{name}: {value:,.2f} {unit} (goal {most:,.0f})", flush=True)


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


@contextlib.contextmanager
def opened(url: str) -> Iterator[Any]:
    """A tab that is opening the page, and reports nothing wrong in the end; None where no Chromium is installed."""
    program = browser.installed()
    if program is None:
        print("no chromium is installed: not opened in a browser", file=sys.stderr)
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="primerl-bench-") as profile, browser.tab(program, Path(profile)) as tab:
        tab.size(1280, 900)
        tab.goto(f"{url}/")
        yield tab
        assert tab.complaints == [], tab.complaints


def painted_ms(tab: Any) -> float:
    return float(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1"))
