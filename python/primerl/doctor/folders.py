"""Folders that primerl writes to: whether files can be written, renamed and locked there, and the free space."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from primerl.doctor.finding import Finding, amount, note, ok, problem
from primerl.runs.state import VARIABLE, StateError, state_folder

ROOM = 10 * 2**30
"""Bytes that a run of a small model fills within a day: checkpoints, published weights, the journal."""


def findings(output: Path) -> Iterator[Finding]:
    """`output`: where runs are to write."""
    yield _folder("output folder", output, "runs write checkpoints, weights and the journal there")
    try:
        yield _folder("state folder", state_folder(), f"the list of runs is there; {VARIABLE} names another")
    except StateError as error:
        yield note("state folder", "none", f"{error}; until then the run's own folder is used")
    yield _folder("temporary folder", Path(tempfile.gettempdir()), "TMPDIR names another")
    yield _folder("cache of the hub", _hub_cache(), "models are downloaded to it; HF_HOME names another")


def hub_home() -> Path:
    """As huggingface_hub chooses it, which takes half a second to import."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(home))


def _hub_cache() -> Path:
    given = os.environ.get("HF_HUB_CACHE")
    return Path(os.path.expanduser(given)) if given else hub_home() / "hub"


def _folder(about: str, folder: Path, use: str) -> Finding:
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        free = shutil.disk_usage(existing).free
        _try(existing)
    except OSError as error:
        return problem(about, f"{folder}: {error.strerror or error}", f"{use}; make it writable, or choose another")
    found = f"{folder}, {amount(free)} free"
    if free < ROOM and about == "output folder":
        return note(about, found, "a run that finds the disk full stops by itself, and resumes once there is room")
    if not _locks(existing):
        return note(
            about, found, "files cannot be locked there: two runs would not notice each other; use a local disk"
        )
    return ok(about, found)


def _try(folder: Path) -> None:
    """As everything that has to be whole is written: a temporary name, fsync, rename. Raises OSError."""
    number, name = tempfile.mkstemp(prefix=".primerl-doctor-", dir=folder)
    other = f"{name}-renamed"
    try:
        os.write(number, b"primerl")
        os.fsync(number)
        os.rename(name, other)
    finally:
        os.close(number)
        for file in (name, other):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)


def _locks(folder: Path) -> bool:
    with tempfile.TemporaryFile(prefix=".primerl-doctor-", dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
