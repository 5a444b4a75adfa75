"""The run's key, which every process of a run shows to its orchestrator. Standard library only.

Agents never get it: with it they could report their own rewards, or end the run. The orchestrator takes the key from
its environment; where there is none, it makes one and keeps it in the run's folder for as long as the run lasts.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

VARIABLE = "PRIMERL_API_KEY"
"""Set in the environment of the orchestrator and of everything that talks to it."""
FILE = "run/key"
"""Relative to the output folder, mode 0600: the key of a run that was started without `VARIABLE`."""
KEY_BYTES = 32

_learned: dict[str, str] = {}  # address -> key
_made: dict[Path, str] = {}  # folder -> key that this process has made for the run there


def made(folder: Path) -> str:
    """A key for the run in `folder`: what it has had, or a new one. Its orchestrator is to get it as `VARIABLE`, which
    takes it as given by the user and deletes the file, so [`keep`][primerl.run_key.keep] writes that again."""
    _made[folder] = _kept(folder) or secrets.token_hex(KEY_BYTES)
    return _made[folder]


def keep(folder: Path) -> None:
    """Once its orchestrator listens: writes the key that was made, for commands that ask the run."""
    key = _made.get(folder)
    if key is None or _kept(folder) == key:
        return
    file = folder / FILE
    temporary = file.with_name(f".key.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(f"{key}\n")
    temporary.rename(file)


def run_key(folder: str | os.PathLike[str] | None = None) -> str | None:
    """The key of the run in `folder` that its orchestrator made, else the environment's.

    An orchestrator that was started with `VARIABLE` leaves no file: where there is one, it is right.
    """
    kept = None if folder is None else _kept(Path(folder))
    return kept or os.environ.get(VARIABLE) or None


def learn(url: str, folder: str | os.PathLike[str]) -> None:
    """Requests to the orchestrator at `url` show the key of the run in `folder` from now on."""
    address = urlsplit(url).netloc
    kept = _kept(Path(folder))
    if kept is None:
        _learned.pop(address, None)
    else:
        _learned[address] = kept


def run_key_header(url: str) -> dict[str, str]:
    """The header of every request to the orchestrator at `url`; empty where no key is known."""
    key = _learned.get(urlsplit(url).netloc) or run_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _kept(folder: Path) -> str | None:
    try:
        return (folder / FILE).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
