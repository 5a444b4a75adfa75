"""Env workers that join a run from elsewhere, as its launcher sees them: whom it waits for, and how."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from primerl.config.rl import RLConfig
from primerl.launch import status as orchestrator_status
from primerl.run_key import FILE, VARIABLE

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
ANY = ("0.0.0.0", "::", "[::]")


def environments(config: RLConfig) -> list[str]:
    """Those that have no workers on this machine."""
    sources = config.orchestrator
    return [entry.label for entry in [*sources.train.env, *sources.eval.env] if not entry.num_workers]


def announcement(config: RLConfig, url: str, folder: Path) -> str | None:
    """What somebody has to start elsewhere; None where nothing is waited for."""
    names = environments(config)
    if not names:
        return None
    port = urlsplit(url).port
    host = config.orchestrator.host
    commands = "".join(f"\n  primerl env-worker --join {reached_at(host, port)} --env {name}" for name in names)
    file = folder / FILE
    key = f"{VARIABLE}=$(cat {shlex.quote(os.fspath(file))})" if file.is_file() else f"the run's {VARIABLE}"
    here = f"\n  (with {key} in the environment"
    if host in LOOPBACK:
        here += f"; it listens on {host}, which only this machine reaches: for others set orchestrator.host, and "
        here += f"{VARIABLE} on both sides"
    here += ")"
    return (
        f"waiting for env workers to join, for at most timeouts.join_s = {config.timeouts.join_s:g} s:{commands}{here}"
    )


def reached_at(host: str, port: int | None) -> str:
    """The orchestrator's URL as other machines may have it: nobody reaches `0.0.0.0`."""
    if host in ANY:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def missing(config: RLConfig, status: dict[str, Any]) -> list[str]:
    return orchestrator_status.not_joined(status, environments(config))


def too_late(config: RLConfig, waiting: list[str]) -> str:
    return (
        f"not everything has joined within timeouts.join_s = {config.timeouts.join_s:g} s: {'; '.join(waiting)}; start "
        "it with `primerl env-worker --join`, raise timeouts.join_s where that takes longer, or give the environment "
        "workers of this machine (num_workers)"
    )
