"""The addresses of a run, as they are shown to people."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

from primerl.net import addresses
from primerl.run_key import FILE, VARIABLE, run_key

ANY = ("0.0.0.0", "::", "[::]")


def page(url: str, folder: Path, *, is_seen_once: bool) -> str:
    """With the key that the run has made, where the output is a terminal; other output ends in logs."""
    parts = urlsplit(url)
    url = reached_at(parts.hostname or "", parts.port)
    file = folder / FILE
    if not file.is_file():
        return f"{url}/#key=... (the value of {VARIABLE})"
    return f"{url}/#key={run_key(folder)}" if is_seen_once else f"{url}/#key=... (the content of {file})"


def reached_at(host: str, port: int | None) -> str:
    """The orchestrator's URL as other machines may have it: `0.0.0.0` is no address to connect to."""
    if host in ANY:
        host = socket.gethostname()
    return addresses.url_of(host, port)
