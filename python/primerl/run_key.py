"""The run's key, which every process of a run shows to an orchestrator that has one. Standard library only."""

from __future__ import annotations

import os

VARIABLE = "PRIMERL_API_KEY"
"""Set in the environment of the orchestrator and of everything that talks to it."""


def run_key() -> str | None:
    return os.environ.get(VARIABLE) or None


def run_key_header() -> dict[str, str]:
    """Of every request to the orchestrator; empty where there is no key."""
    key = run_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}
