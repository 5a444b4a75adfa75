"""The user's state folder: what primerl remembers beyond one run. Standard library only (layout: docs/runs.md)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "PRIMERL_STATE_DIR"
WITHIN_RUN = Path("run") / "state"
"""In a run's folder: the state folder of a user without a home."""


class StateError(Exception):
    """The state folder, or what is in it, cannot be used. The message names it and what to do."""


def state_folder() -> Path:
    """`$PRIMERL_STATE_DIR`, else `$XDG_STATE_HOME/primerl`, else `~/.local/state/primerl`; it may not exist.

    Raises StateError where there is no home folder: HOME is not set, and the user's id is in no list of users.
    """
    own = os.environ.get(VARIABLE)
    if own:
        return Path(os.path.abspath(os.path.expanduser(own)))
    base = os.environ.get("XDG_STATE_HOME", "")
    # A relative one is to be ignored, says the XDG base directory specification.
    if os.path.isabs(base):
        return Path(base) / "primerl"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise StateError(
            f"the state folder is unknown: HOME is not set, and user {os.getuid()} has no home folder; set {VARIABLE} "
            "to a folder of yours"
        )
    return Path(home) / ".local" / "state" / "primerl"


def within_run(output_dir: str) -> str | None:
    """For a user without a home, as containers have, or whose home cannot be written to (`HOME=/`): from now on the
    state folder of this process, and of those that it starts, is in the run's folder. Returns the sentence that says
    so; None where the usual one can be used, or was named by the variable."""
    reason = _why_none()
    if reason is None:
        return None
    folder = os.path.join(os.path.abspath(os.path.expanduser(output_dir)), WITHIN_RUN)
    os.environ[VARIABLE] = folder
    return f"{reason}: the state folder (list of runs, virtualenvs, store) is {folder}; set {VARIABLE} to have another"


def _why_none() -> str | None:
    """Why there can be no state folder at its usual place. One that is there is used as far as it can be."""
    try:
        folder = state_folder()
    except StateError:
        return f"HOME is not set, and user {os.getuid()} has no home folder"
    if os.environ.get(VARIABLE) or os.path.lexists(folder):
        return None
    above = next(parent for parent in folder.parents if os.path.lexists(parent))
    if os.access(above, os.W_OK | os.X_OK):
        return None
    return f"{folder} cannot be made, as user {os.getuid()} may not write to {above}"


def private_folder(*parts: str) -> Path:
    """A folder in the state folder that only its owner may look into, made where it is missing. Raises StateError."""
    folder = state_folder()
    try:
        for part in ("", *parts):
            folder = folder / part
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # From an earlier version, or made by hand: there may be secrets below.
        state_folder().chmod(0o700)
    except OSError as error:
        raise StateError(f"{folder} cannot be used: {error}; set {VARIABLE} to a folder of yours") from None
    return folder


def write_private(file: Path, content: str) -> None:
    """Mode 600 from the first byte on; under a temporary name, synced, then renamed. Raises StateError."""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.rename(temporary, file)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise StateError(f"{file} cannot be written: {error}") from None


def process_started(pid: int) -> str | None:
    """When the process was started, in a form that distinguishes it from others with the same id; None if there is
    none."""
    if not sys.platform.startswith("linux"):
        done = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
        return done.stdout.strip() or None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    # The second field is a name, which may hold spaces and brackets; the state is the first after it.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else f"{boot}:{fields[19].decode()}"
