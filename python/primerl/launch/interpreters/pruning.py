"""Finds and removes the virtualenvs made by primerl that are no longer needed.

One stays while a run of the list asks for it (what it would install now: of a local package its present content), while
a process runs in it, while somebody installs it, and for an hour after it was last asked for: a start that is still
being checked is in no list yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.launch.interpreters import virtualenvs
from primerl.runs.registry import Registry
from primerl.runs.state import state_folder

SPARED_S = 3600.0
LEFTOVERS = (".partial", ".removed")


@dataclass(frozen=True, slots=True)
class Made:
    folder: Path
    size: int
    """Bytes of its files; those that uv links from its cache count too."""
    requirements: list[str]
    """Empty where it is not known."""
    needed: str
    """Why it stays; empty where it may go."""


def found() -> list[Made]:
    """All of them, by name. Raises StateError where the list of runs cannot be read."""
    parent = state_folder() / virtualenvs.FOLDER
    folders = sorted(entry for entry in parent.iterdir() if entry.is_dir()) if parent.is_dir() else []
    if not folders:
        return []
    asked, running = _asked(), _running()
    return [_looked_at(folder, asked, running) for folder in folders]


def remove(made: Made) -> bool:
    """False where it is needed by now. A removal that is cut short is finished by the next one."""
    with _locked(made.folder) as is_ours:
        if not is_ours or not made.folder.is_dir() or _spared(made.folder) or _processes(made.folder, _running()):
            return False
        # Renamed first, so that no process finds half of it under its own name.
        removed = made.folder.with_suffix(".removed")
        if removed != made.folder:
            shutil.rmtree(removed, ignore_errors=True)
            made.folder.rename(removed)
        shutil.rmtree(removed)
    return True


def _looked_at(folder: Path, asked: dict[str, str], running: list[str]) -> Made:
    needed = ""
    if processes := _processes(folder, running):
        needed = f"{processes} process{'' if processes == 1 else 'es'} of it"
    elif not _is_free(folder):
        needed = "being installed"
    elif folder.name in asked:
        needed = f"run {asked[folder.name]}"
    elif _spared(folder):
        needed = "asked for within the last hour"
    return Made(folder, _size(folder), virtualenvs.requirements_of(folder), needed)


def _asked() -> dict[str, str]:
    """Names of virtualenvs, with a run that asks for each."""
    with Registry() as registry:
        runs = registry.all()
    asked = {}
    for run in runs:
        # A run without it cannot continue.
        with contextlib.suppress(OSError, ValueError):
            for requirements in _requirements(tomllib.loads(run.config.read_text(encoding="utf-8"))):
                asked[virtualenvs.folder_of(requirements, run.folder).name] = f"{run.id} ({run.name})"
    return asked


def _requirements(node: Any) -> Iterator[list[str]]:
    if isinstance(node, list):
        for inner in node:
            yield from _requirements(inner)
    elif isinstance(node, dict):
        python = node.get("python")
        if isinstance(python, dict) and isinstance(python.get("requirements"), list):
            yield [str(requirement) for requirement in python["requirements"]]
        for inner in node.values():
            yield from _requirements(inner)


def _running() -> list[str]:
    """What shows each process's virtualenv: its command line, and `VIRTUAL_ENV` where it can be read."""
    processes = Path("/proc")
    if not (processes / "self").exists():
        done = subprocess.run(
            ["ps", "-axww", "-o", "command="],
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
            errors="replace",
        )
        return done.stdout.splitlines()
    told = []
    for entry in processes.iterdir():
        if not entry.name.isdigit():
            continue
        parts: list[str] = []
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            parts += (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            parts += [variable for variable in variables if variable.startswith("VIRTUAL_ENV=")]
        told.append("\n".join(parts))
    return told


def _processes(folder: Path, running: list[str]) -> int:
    path = os.fspath(folder)
    return sum(f"{path}/" in told or told.endswith(f"VIRTUAL_ENV={path}") for told in running)


def _spared(folder: Path) -> bool:
    if folder.suffix in LEFTOVERS:
        return False
    files = [file for file in (folder, folder.with_suffix(".lock")) if file.exists()]
    return time.time() - max(file.stat().st_mtime for file in files) < SPARED_S


def _is_free(folder: Path) -> bool:
    with _locked(folder) as is_ours:
        return is_ours


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether no other process installs it; none can begin within the block."""
    lock = folder.with_suffix(".lock")
    if not lock.exists():  # an installation creates it first
        yield True
        return
    # Not written to: its time is that of the last who asked for the virtualenv.
    with lock.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).lstat().st_size
    return total


__all__ = ["Made", "found", "remove"]
