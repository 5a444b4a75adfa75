"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAST_LINE_BYTES = 1 << 20
"""More than the size of a line of metrics."""


class NoRoomError(OSError):
    """A disk is too full for what is about to be written. The message names disk, path, needed and free bytes."""

    def __init__(self, path: Path, disk: Path, needed: int, free: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.message = (
            f"the disk mounted at {disk} has {in_gb(free)} free, and {path} needs {in_gb(needed)}: make room on it"
        )

    def __str__(self) -> str:
        return self.message


def check_room(path: Path, needed: int) -> None:
    """Raises NoRoomError if the disk of `path`, which need not exist yet, lacks `needed` bytes.

    What has gone wrong half-way is removed again, but by then it has taken a minute, and others may have found the disk
    full meanwhile, whose errors name something else.
    """
    there = next((folder for folder in (path, *path.parents) if folder.exists()), Path())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise NoRoomError(path, _mounted_at(there.resolve()), needed, free)


def _mounted_at(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_mount() or folder == folder.parent)


def in_gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10_000_000 else f"{size} bytes"


@contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder next to `target` to be filled; at the end it is synced and renamed to `target`.

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
    """Sync a complete folder and give it its name, replacing one of that name."""
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


def lines_of_steps(path: Path, last: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of steps up to `last` of a file with one JSON object a step, each with what it says; without those that
    a crash cut short. None if there is no such file."""
    if not path.exists():
        return
    # A failed disk may leave anything, and a cut character is invalid JSON.
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found = json.loads(line)
            wanted = found["step"] <= last
        except (ValueError, KeyError, TypeError):
            continue
        if wanted:
            yield line, found


def keep_steps(path: Path, last: int) -> None:
    """Keep the lines of steps up to `last` in a file with one JSON object a step; a line that a crash cut short is
    removed too."""
    if path.exists():
        write_text(path, "".join(f"{line}\n" for line, _ in lines_of_steps(path, last)))


def last_line(path: Path) -> dict[str, Any]:
    """The last complete line of a file with a JSON object a line, of any size; empty if there is none."""
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
            continue  # empty, or half a line of a killed process
        if isinstance(found, dict):
            return found
    return {}


def remove_temporary(path: Path) -> None:
    """Remove what `write_text` left next to `path` in processes that were killed. No one else may be writing it."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
