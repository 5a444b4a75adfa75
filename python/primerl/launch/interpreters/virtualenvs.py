"""Virtualenvs that primerl makes of lists of requirements, and keeps in the user's state folder.

    <state folder>/virtualenvs/<digest>/        of the requirements, local packages' contents and the Python version
    <state folder>/virtualenvs/<digest>.lock    held by who installs

A virtualenv is made under another name and renamed when it is complete, so one that is there can be used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from primerl.runs.state import StateError, private_folder, state_folder

FOLDER = "virtualenvs"
REQUIREMENTS = "primerl-requirements.json"
LAST_LINES = 12
POLL_S = 0.2
# Folders in a local package's folder that are built from it, or do not belong to it.
EXCLUDED = {"build", "dist", "__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "outputs"}


# What was installed by this process: an installer may leave files in the folder of a local package.
_made: dict[tuple[str, ...], Path] = {}


class InstallError(Exception):
    """The message says what is wrong, with the installer's last lines."""


def folder_of(requirements: list[str], base: Path | None = None) -> Path:
    """Where the virtualenv of these requirements is, or will be. Their order does not matter.

    Args:
        base: Where relative paths of local packages begin; the working directory by default.
    """
    content = {
        "python": [sys.implementation.cache_tag, sys.base_prefix],
        "requirements": sorted(set(requirements)),
        "local": {name: _digest(path) for name, path in _local(requirements, base)},
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return state_folder() / FOLDER / digest[:20]


def installed(requirements: list[str]) -> Path:
    """The one that this process has found or made last, whatever has changed since; else as `folder_of`."""
    return _made.get(tuple(requirements)) or folder_of(requirements)


def _local(requirements: list[str], base: Path | None) -> Iterator[tuple[str, Path]]:
    for requirement in sorted(set(requirements)):
        # `./my-env[extra]`, `my-env @ ./my-env`
        text = requirement.rpartition(" @ ")[2].removeprefix("file://")
        for candidate in (text, text.partition("[")[0]):
            path = Path(os.path.abspath(os.path.join(base or "", os.path.expanduser(candidate.strip()))))
            if (os.sep in candidate or candidate in (".", "..") or candidate.endswith(".whl")) and path.exists():
                yield requirement, path
                break


def _digest(path: Path) -> str:
    found = hashlib.sha256(os.fspath(path).encode())
    files = [path] if path.is_file() else sorted(_files(path))
    for file in files:
        content = file.read_bytes()
        found.update(f"\0{file.relative_to(path)}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in EXCLUDED and not name.endswith(".egg-info")]
        yield from (Path(parent) / name for name in names if (Path(parent) / name).is_file())


def install(requirements: list[str], timeout_s: float, say: Callable[[str], None] = lambda _: None) -> Path:
    """The virtualenv's folder; it is made where it is not there. Raises InstallError.

    Args:
        timeout_s: Of everything, the wait for another run that installs the same included.
        say: Told before something is done that takes long.
    """
    deadline = time.monotonic() + timeout_s
    try:
        folder = folder_of(requirements)
        if folder.is_dir():
            # Tells `primerl env prune` that it is needed, before the run is in the list.
            folder.with_suffix(".lock").touch()
            _made[tuple(requirements)] = folder
            return folder
        private_folder(FOLDER)
    except (StateError, OSError) as error:
        raise InstallError(str(error)) from None
    uv = find_uv()
    with _locked(folder.with_suffix(".lock"), deadline, say):
        if not folder.is_dir():
            say(f"installing {', '.join(requirements)} into {folder}")
            _make(uv, folder, requirements, deadline)
    _made[tuple(requirements)] = folder
    return folder


def requirements_of(folder: Path) -> list[str]:
    """What was asked for when it was made; nothing where that was not noted."""
    try:
        return [str(requirement) for requirement in json.loads((folder / REQUIREMENTS).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def uv_program() -> str | None:
    """uv of this interpreter's virtualenv, or of `PATH`."""
    own = Path(sys.executable).parent / "uv"
    return os.fspath(own) if os.access(own, os.X_OK) else shutil.which("uv")


def find_uv() -> str:
    """uv's program. Raises InstallError."""
    found = uv_program()
    if found is None:
        raise InstallError(
            "uv, which installs them, is not there; `pip install uv`, or install them yourself and give the "
            "virtualenv's `path`"
        )
    return found


@contextlib.contextmanager
def _locked(file: Path, deadline: float, say: Callable[[str], None]) -> Iterator[None]:
    """The kernel unlocks it at our death."""
    waits = False
    with file.open("w", encoding="utf-8") as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InstallError(
                        "another run is installing them, and did not end within timeouts.install_s"
                    ) from None
                if not waits:
                    say("waiting for another run, which installs the same requirements")
                waits = True
                time.sleep(POLL_S)
        yield


def _make(uv: str, folder: Path, requirements: list[str], deadline: float) -> None:
    # Left by a run that was killed; under our lock no other process writes there.
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # It will be renamed: its scripts must find it wherever it is.
        _uv([uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, os.fspath(partial)], deadline)
        python = os.fspath(partial / "bin" / "python")
        _uv([uv, "pip", "install", "--compile-bytecode", "--python", python, "--", *requirements], deadline)
        (partial / REQUIREMENTS).write_text(json.dumps(sorted(set(requirements))), encoding="utf-8")
        os.rename(partial, folder)
    except OSError as error:
        raise InstallError(f"{partial} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _uv(command: list[str], deadline: float) -> None:
    # What the user has set for another virtualenv is not of this one.
    variables = {name: value for name, value in os.environ.items() if name not in ("UV_PYTHON", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            timeout=max(1.0, deadline - time.monotonic()),
            check=False,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise InstallError("installing them did not end within timeouts.install_s; raise it") from None
    if done.returncode:
        lines = [line.rstrip() for line in done.stderr.splitlines() if line.strip()][-LAST_LINES:]
        said = "\n".join(f"  {line}" for line in lines)
        raise InstallError(f"installing them failed (uv, exit code {done.returncode}):\n{said}")
