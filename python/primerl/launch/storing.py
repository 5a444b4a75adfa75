"""The launcher's part of the checkpoint store: it starts the process that uploads, passes on what that says, and waits
for the last upload. Training never waits: the process only reads what is whole."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import xxhash

from primerl.config import resolve
from primerl.config.resolve import ProcessConfig
from primerl.config.rl import RLConfig
from primerl.config.store import StoreWorkerConfig
from primerl.launch.console import Console
from primerl.launch.processes import Processes
from primerl.launch.starting import RunFailedError
from primerl.runs.uploads import REPORT

NAME = "store"
LAST_S = 900.0
"""For what is still to be uploaded when everything is trained."""


def process_of(config: RLConfig, run_id: str | None, folder: Path) -> ProcessConfig | None:
    """None where nothing is to be stored."""
    if config.store is None:
        return None
    resolved = StoreWorkerConfig(
        # Without the list of runs there is no id; this one is at least the same at each start.
        run=run_id or xxhash.xxh3_64_hexdigest(str(folder).encode())[:8],
        output_dir=str(folder),
        model=resolve.absolute(config.model.path),
        url=config.store.url,
        keep=config.store.keep,
        adapters_interval=config.store.adapters.interval,
        adapters_keep=config.store.adapters.keep,
    )
    return ProcessConfig(
        kind="store-worker",
        name=NAME,
        config=resolved,
        file=folder / "configs" / f"{NAME}.toml",
        log=folder / "logs" / f"{NAME}.log",
        threads=1,
    )


class Storing:
    """What is known of the uploads of this start."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / REPORT
        self._read_at = 0.0
        self._told: dict[str, str] = {}
        # Of a start before this one.
        self._file.unlink(missing_ok=True)

    def look(self, console: Console) -> None:
        """Says each failure once."""
        try:
            changed = self._file.stat().st_mtime
        except OSError:
            return
        if changed == self._read_at:
            return
        self._read_at = changed
        failed: dict[str, str] = self._report().get("failed", {})
        for name, reason in failed.items():
            if self._told.get(name) != reason:
                console.say(f"{name} is not stored yet, which is tried again: {reason}")
        self._told = dict(failed)

    def finish(self, processes: Processes, console: Console, stop_s: float, *, stay: Collection[str]) -> None:
        """Waits for the last uploads, with nothing else running but `stay`.

        Raises RunFailedError where one was lost.
        """
        process = processes.by_name.get(NAME)
        if process is None:
            return
        others = [name for name, other in processes.by_name.items() if not other.ended and name not in (NAME, *stay)]
        if others:  # none would mean all
            processes.stop(grace_s=stop_s, names=others)
        if not process.ended:
            processes.stop(grace_s=LAST_S, names=[NAME])
        self.look(console)
        report = self._report()
        waiting = [*report.get("waiting", []), *(name for name in report.get("failed", {}) if "/" not in name)]
        if process.code == 0 and not waiting:
            return
        reason = next(iter(report.get("failed", {}).values()), f"its process {process.describe_end()}")
        raise RunFailedError(
            f"trained, but not all is in the store ({', '.join(waiting) or 'unknown'}): {reason}; nothing of it is "
            "lost, and the same command (`primerl run resume`) uploads it"
        )

    def _report(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
