"""The launcher's part of the checkpoint store: it starts the process that uploads, passes on what that says, and waits
for the last upload. Training never waits: the process only reads what is whole."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import xxhash

from primerl.config.process_files import files
from primerl.config.process_files.files import ProcessConfig, write_text
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.services import StoreWorkerConfig
from primerl.launch.placement.protocol import Placement
from primerl.launch.report.console import Console
from primerl.launch.supervise.failures import RunFailedError
from primerl.stores.worker import END, REPORT
from primerl.train.checkpoint import staging

NAME = "store"
LAST_S = 900.0
"""For what is still to be uploaded when everything is trained."""
LEAVE_S = 1.0
"""For the process of a run that is stopped: it loses nothing by SIGKILL."""
POLL_S, TELL_AFTER_S = 0.1, 2.0


def process_of(config: RLConfig, run_id: str | None, folder: Path) -> ProcessConfig | None:
    """None where nothing is to be stored."""
    if config.store is None:
        return None
    resolved = StoreWorkerConfig(
        # Without the list of runs there is no id; this one is at least the same at each start.
        run=run_id or xxhash.xxh3_64_hexdigest(str(folder).encode())[:8],
        output_dir=str(folder),
        model=files.absolute(config.model.path),
        url=config.store.url,
        keep=config.store.keep,
        adapters_interval=config.store.adapters.interval,
        adapters_keep=config.store.adapters.keep,
    )
    return files.process(config, "store-worker", NAME, resolved, threads=1)


class Storing:
    """What is known of the uploads of this start."""

    def __init__(self, folder: Path, run: str | None) -> None:
        """`run`: what `primerl run resume` knows it by; None of one that is in no list."""
        self._again = "the same command" if run is None else f"`primerl run resume {run}`"
        self._folder = folder
        self._file = folder / REPORT
        self._read_at = 0.0
        self._told: dict[str, str] = {}
        # Files of an earlier start.
        for file in (END, REPORT):
            (folder / file).unlink(missing_ok=True)

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
                console.say(f"the upload of {name} failed and is tried again: {reason}")
        self._told = dict(failed)

    def finish(
        self,
        placement: Placement,
        console: Console,
        stop_s: float,
        *,
        stay: Collection[str],
        check: Callable[[], None],
    ) -> None:
        """Waits for the last uploads, with nothing else running but `stay`. `check` may raise, to leave them undone.

        Raises RunFailedError where one was lost.
        """
        process = placement.by_name.get(NAME)
        if process is None:
            return
        others = [name for name, other in placement.by_name.items() if not other.ended and name not in (NAME, *stay)]
        if others:  # none would mean all
            placement.stop(grace_s=stop_s, names=others)
        write_text(self._folder / END, "")
        began, told = time.monotonic(), False
        while not process.ended and placement.lost is None:
            check()
            placement.watch(POLL_S)
            self.look(console)
            took = time.monotonic() - began
            if took > LAST_S:
                placement.stop(grace_s=0.0, names=[NAME])
                break  # it ends now, or hangs in its storage, where nothing ends it
            if not told and took > TELL_AFTER_S:
                told = True
                console.say("waiting for the last uploads to the store (Ctrl-C leaves them to the next start)")
        self.look(console)
        report = self._report()
        waiting = [*report.get("waiting", []), *(name for name in report.get("failed", {}) if "/" not in name)]
        if process.code == 0 and not waiting:
            return
        reason = next(
            iter(report.get("failed", {}).values()),
            f"its process {process.describe_end() if process.ended else 'did not end'}",
        )
        raise RunFailedError(
            f"trained, but not all is in the store ({', '.join(waiting) or 'unknown'}): {reason}; nothing of it is "
            f"lost, and {self._again} uploads it"
        )

    def leave(self, placement: Placement, console: Console) -> None:
        """For a run that is stopped: its next start uploads the rest."""
        process = placement.by_name.get(NAME)
        if process is not None and not process.ended:
            placement.stop(grace_s=LEAVE_S, names=[NAME])
        waiting = [one.label for one in staging.staged(self._folder)]
        if waiting:
            console.say(
                f"not in the store yet: {', '.join(waiting)}; nothing of it is lost, and {self._again} uploads it"
            )

    def _report(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
