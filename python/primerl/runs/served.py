"""Where a server of the Tinker API, a run of the kind `serve`, can be asked: it writes that when it is ready."""

from __future__ import annotations

import json
from pathlib import Path

KIND = "serve"
FILE = Path("run") / "tinker.json"
STEPS = "client_steps.jsonl"
"""Optimizer steps of all training clients, in the output folder. `steps.jsonl` is an orchestrator's, of one policy."""


def note_url(folder: Path, url: str) -> None:
    from primerl.train.checkpoint.files import write_text

    (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, json.dumps({"url": url}) + "\n")


def noted_url(folder: Path) -> str | None:
    """The last server that was ready in this folder, which may have ended."""
    try:
        return str(json.loads((folder / FILE).read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
