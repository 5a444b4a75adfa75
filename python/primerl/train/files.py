"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAST_LINE_BYTES = 1 << 20
"""More than a line of metrics has."""


@contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target` to be filled; on leaving it is synced and renamed to `target`.

    After an error nothing is left. Raises FileExistsError when `target` exists, unless it is to be replaced.
    """
    if target.exists() and not replace:
        raise FileExistsError(f"{target} exists already; remove it or choose another output_dir")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        settle(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def settle(temporary: Path, target: Path) -> None:
    """Sync a folder that is complete and give it its name; one that has it goes."""
    for path in sorted(temporary.rglob("*")):
        sync(path)
    sync(temporary)
    former = target.parent / f".{target.name}.{os.getpid()}.former"
    if target.exists():
        target.rename(former)
    temporary.rename(target)
    sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step; a reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync(path.parent)


def keep_steps(path: Path, last: int) -> None:
    """Leaves the lines of steps up to `last` in a file of one JSON object a step; one that a crash cut short goes
    too."""
    if not path.exists():
        return
    kept = []
    # A disk that failed may have left anything, and JSON of a cut character is none.
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
    write_text(path, "".join(kept))


def last_line(path: Path) -> dict[str, Any]:
    """The last whole one of a file of JSON objects, a line each, of any size; empty where there is none."""
    try:
        with path.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - LAST_LINE_BYTES))
            lines = opened.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # nothing, or half a line that a kill has left
        if isinstance(found, dict):
            return found
    return {}


def remove_temporary(path: Path) -> None:
    """What `write_text` has left beside `path` in processes that were killed. Nobody else may be at it."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
