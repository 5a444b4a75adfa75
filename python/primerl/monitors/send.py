"""One monitor: its thread, its cursor, its attempts."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from primerl.config.process_files.files import write_text
from primerl.config.schema.monitors import MonitorConfig, MonitorEntry
from primerl.monitors import extras
from primerl.monitors.load import load
from primerl.monitors.monitor import Monitor, RefusedError, Run, Status
from primerl.monitors.records import Record, Records

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 1.0
"""Once the run has ended, and every attempt may be the last."""


class Sender(threading.Thread):
    """Sends records from the cursor on, and the end after the last one.

    The cursor, `monitor/<name>.json`, is on the disk after each record that the monitor has taken.
    """

    def __init__(self, config: MonitorConfig, entry: MonitorEntry, records: Records) -> None:
        # A service that hangs must not hold the process up.
        super().__init__(name=f"monitor {entry.name}", daemon=True)
        self.config = config
        self.entry = entry
        self.records = records
        self.output_dir = Path(config.output_dir)
        self.file = self.output_dir / "monitor" / f"{entry.name}.json"
        stored = _read(self.file)
        self.next: int = stored.get("next", 0)
        self.finished: Status | None = stored.get("finished")
        self.state: dict[str, Any] = stored.get("state", {})
        self.told: dict[str, str] = {}
        """For the launcher: `url`, say."""
        self.error: str | None = None
        """The last attempt's error; None where it succeeded."""
        self.is_given_up = False
        self.passed = 0
        """Records before this one are never sent again."""
        self._knows_best = False  # the service, of what it has: it may have less than the cursor says
        self._end: tuple[Status, str] | None = None
        self._woken = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be sent, the end included."""
        return self._end is not None and self.finished == self._end[0] and self.next >= len(self.records)

    def end(self, status: Status, reason: str) -> None:
        """No further record will be written."""
        self._end = (status, reason)
        self._woken.set()
        self.records.wake()

    def run(self) -> None:
        pause = FIRST_PAUSE_S
        monitor: Monitor | None = None
        while not self.is_done:
            try:
                if monitor is None:
                    monitor = load(self.entry)
                    self._start(monitor)
                self._send(monitor)
                pause = FIRST_PAUSE_S
            except RefusedError as error:
                self.is_given_up, self.error = True, str(error)
                log.error("monitor %s is given up: %s", self.entry.name, error)
                return
            except Exception as error:  # noqa: BLE001 (a monitor may raise anything, and training has no part in it)
                self._failed(error, pause)
                # One that failed to start is created again, since it may be half initialised.
                monitor = monitor if self.told.get("started") else None
                if self._end is None:
                    self._woken.wait(pause)
                else:
                    time.sleep(min(pause, LAST_PAUSE_S))
                pause = min(2 * pause, self.config.retry_s)

    def _start(self, monitor: Monitor) -> None:
        self.told.pop("started", None)
        run = Run(
            folder=self.output_dir,
            kind=self.config.kind,
            name=self.output_dir.name,
            model=self.config.model,
            max_steps=self.config.max_steps,
            config=self.config.run,
            state=self.state,
            remember=self._remember,
            say=self.told.update,
        )
        has = monitor.start(run)
        if has is not None and has != self.next:
            log.info("monitor %s: the service has %d records, the cursor says %d", self.entry.name, has, self.next)
            self.next = min(has, len(self.records))
        self._knows_best = has is not None
        self.passed = self.next
        self.finished = None
        self._store()
        self.told["started"] = "yes"
        self._recovered()

    def _send(self, monitor: Monitor) -> None:
        if self.records.wait(self.next, 1.0 if self._end is None else 0.0):
            record = self.records[self.next]
            monitor.number = record.number
            self._tell(monitor, record)
            self.next += 1
            self._store()
            if not self._knows_best:
                self.passed = self.next
            self._recovered()
        elif self._end is not None and self.next >= len(self.records):
            status, reason = self._end
            monitor.number = self.next
            monitor.finish(status, reason)
            self.finished = status
            self._store()
            self.passed = self.next
            self._recovered()

    def _tell(self, monitor: Monitor, record: Record) -> None:
        if record.kind == "metrics":
            monitor.log(record.step, record.values)
        elif record.kind == "evaluation":
            monitor.log(record.step, record.values["metrics"])
        else:
            try:
                content = extras.read(self.output_dir, record.step)
            except FileNotFoundError:  # removed when all monitors had it, of which this one was none then
                log.warning(
                    "monitor %s: step %d is reported without samples and distributions", self.entry.name, record.step
                )
                return
            samples = extras.samples_for(self.entry, record.step, content)
            if samples:
                monitor.samples(record.step, samples)
            distributions = extras.distributions_for(self.entry, record.step, content)
            if distributions:
                monitor.distributions(record.step, distributions)

    def _remember(self, **values: Any) -> None:
        self.state.update(values)
        self._store()

    def _store(self) -> None:
        content = {"next": self.next, "finished": self.finished, "state": self.state}
        write_text(self.file, json.dumps(content) + "\n")

    def _failed(self, error: Exception, pause: float) -> None:
        said = f"{type(error).__name__}: {error}"
        if said != self.error:
            log.warning("monitor %s: %s; tried again", self.entry.name, said, exc_info=self.error is None)
        self.error = said

    def _recovered(self) -> None:
        if self.error is not None:
            log.info("monitor %s takes it again", self.entry.name)
        self.error = None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
