"""Keeps the rows of small files, so that a process which checks them before training reads them once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")

MOST_BYTES = 4 * 2**20
"""Bytes of a file; in memory its rows take some 25 times as much."""

_kept: dict[Path, tuple[tuple[int, ...], list[object]]] = {}


def keeping(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """Yields the rows of the file, and keeps them for `taken` once all are read. Raises OSError."""
    version = _version(path)
    if os.path.getsize(path) > MOST_BYTES:
        yield from rows
        return
    kept: list[object] = []
    for row in rows:
        kept.append(row)
        yield row
    _kept[path] = version, kept


def taken(path: Path) -> Iterator[object] | None:
    """The kept rows, which are then dropped; None if there are none, or the file has changed."""
    version, rows = _kept.pop(path, ((), []))
    try:
        return iter(rows) if version and version == _version(path) else None
    except OSError:  # reported when the file is read
        return None


def _version(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
