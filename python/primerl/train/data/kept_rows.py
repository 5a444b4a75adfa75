"""Rows of small files are read once, where a process checks them before it trains on them."""

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
    """Gives the rows of the file, and keeps them for `taken` once all were read. Raises OSError."""
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
    """The rows that were kept, which are then forgotten; None where there are none, or the file has changed."""
    version, rows = _kept.pop(path, ((), []))
    try:
        return iter(rows) if version and version == _version(path) else None
    except OSError:  # which is reported by whoever reads it
        return None


def _version(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
