"""What the dashboard reads of a run: the page's readers (`primerl._core`), kept for those that are looked at.

Curves are columns in memory, which only new lines are added to; rollouts come from the page's index of the journal,
served on loopback for as long as somebody looks at that run.
"""

from __future__ import annotations

import json
import threading
import urllib.error
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from primerl._core import PageServer, PrimerlError, RunCurves
from primerl.cli.looking import model_of
from primerl.launch.supervise.lock import in_use
from primerl.net.requests import open_url
from primerl.runs import served

MOST_CURVES = 64
"""Runs whose columns are in memory: about 2 MB each with 10,000 steps of 40 metrics."""
MOST_PAGES = 8
"""Runs whose journal is in memory: 14 MB each at most, and two threads."""
PATIENCE_S = 30.0


class SourceError(Exception):
    """Something of this run cannot be read. The message says what and why."""


Source = TypeVar("Source")


class Kept(Generic[Source]):
    """The last used ones by folder, each made once."""

    def __init__(self, make: Callable[[Path], Source], most: int, close: Callable[[Source], None]) -> None:
        self._make, self._most, self._close = make, most, close
        self._sources: OrderedDict[Path, Source] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: Path) -> Source:
        with self._lock:
            source = self._sources.get(folder)
            if source is None:
                source = self._sources[folder] = self._make(folder)
            self._sources.move_to_end(folder)
            closed = [self._sources.popitem(last=False)[1] for _ in range(len(self._sources) - self._most)]
        for one in closed:
            self._close(one)
        return source

    def drop(self, folder: Path) -> None:
        with self._lock:
            source = self._sources.pop(folder, None)
        if source is not None:
            self._close(source)

    def clear(self) -> None:
        for folder in list(self._sources):
            self.drop(folder)


class Sources:
    """Readers by output folder. Threads may share it."""

    def __init__(self) -> None:
        self._curves: Kept[RunCurves] = Kept(RunCurves, MOST_CURVES, lambda _: None)
        self._pages: Kept[PageServer] = Kept(_page, MOST_PAGES, lambda page: page.stop())

    def curves(self, folder: Path) -> RunCurves:
        """Raises SourceError where the folder is gone; its files may be missing."""
        if not folder.is_dir():
            self._curves.drop(folder)
            raise SourceError(f"its folder {folder} is gone")
        return self._curves.of(folder)

    def page_url(self, folder: Path) -> str:
        """Where the page of this run is served, on loopback. Raises SourceError."""
        if not folder.is_dir():
            self._pages.drop(folder)
            raise SourceError(f"its folder {folder} is gone")
        if (address := served.noted_url(folder)) is not None:
            if not in_use(folder):
                raise SourceError("it serves its page itself while it runs, and it has ended")
            return address
        try:
            return self._pages.of(folder).url
        except (PrimerlError, OSError) as error:
            raise SourceError(f"its journal cannot be read: {error}") from None

    def ask(self, folder: Path, path: str) -> str:
        """The page's answer, JSON text, to a path with its query. Raises SourceError in the page's words."""
        url = f"{self.page_url(folder)}{path}"
        try:
            with open_url(url, PATIENCE_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise SourceError(_words(error)) from None
        except OSError as error:
            raise SourceError(f"its journal cannot be read: {error}") from None

    def close(self) -> None:
        self._pages.clear()
        self._curves.clear()


def _page(folder: Path) -> PageServer:
    return PageServer(folder, model_of(folder))


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"the page of this run answered {error.code}"
