"""Logs of a role on the nodes of a cluster, and messages about it in them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path


def log_files(log: Path, name: str, nodes: Sequence[str]) -> list[Path]:
    """By node: the role's own log, and for the nodes after its first `<role>/node_<i>.log` next to it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if len(nodes) == 1:
        return [log]
    folder = log.parent / name
    folder.mkdir(exist_ok=True)
    first = folder / "node_0.log"
    with contextlib.suppress(FileExistsError):
        first.symlink_to(os.path.relpath(log, folder))
    return [log, *(folder / f"node_{index}.log" for index in range(1, len(nodes)))]


def note(log: Path, node: int | str, name: str, messages: Sequence[str]) -> None:
    """Adds messages about the role `name`, whose log is `log`, to the log of a node, by its number or address."""
    # The run's `logs`, which a role's log is somewhere below.
    folder = next((parent for parent in log.parents if parent.name == "logs"), log.parent)
    lines = [f"{time.strftime('%H:%M:%S')} {name}: {line}\n" for line in messages]
    with contextlib.suppress(OSError), (folder / f"node_{node}.log").open("a", encoding="utf-8") as opened:
        opened.writelines(lines)
