"""`primerl monitor`: tells the monitors what a run writes, until the run has ended and everything is sent.

The launcher starts it alongside the others and, once they have ended, writes `monitor/end.json`. SIGTERM without that
file means that the launcher was killed. Where the file is there from the beginning, what is left is sent, and that is
all. Exit codes: 0 everything was sent, 1 something is left, 2 bad input, or another process is at it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from primerl.config.errors.validation_errors import describe
from primerl.config.process_files.files import write_text
from primerl.config.schema.monitors import MonitorConfig
from primerl.launch.supervise.trees import MARK
from primerl.monitors import extras
from primerl.monitors.collect import Collector
from primerl.monitors.monitor import Status
from primerl.monitors.records import BusyError, Records, locked
from primerl.monitors.send import Sender
from primerl.process.signals import stop_signals

log = logging.getLogger("primerl.monitors")

LOOK_EVERY_S = 0.3
END_FILE = Path("monitor") / "end.json"
STATUS_FILE = Path("monitor") / "status.json"
RECORDS_FILE = Path("monitor") / "records.jsonl"
WAIT_S = 60.0
"""How long one that the launcher has started waits for another process at the same folder."""
LATE_S = 5.0
"""How long it looks for samples of the last steps once the run has ended."""


def main(settings: dict[str, Any]) -> int:
    try:
        config = MonitorConfig.model_validate(settings)
    except ValidationError as error:
        print(f"error: {describe(error, MonitorConfig)}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    # A command of the user's may still be sending what an earlier start has left; the user's own can be given again.
    is_started = MARK in os.environ
    try:
        process = MonitorProcess(config, WAIT_S if is_started else 0.0)
    except BusyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if is_started else 2
    code = process.run()
    # Threads that hang in a service's own code would delay the exit.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


class MonitorProcess:
    """Not for several threads. Alone at its folder until the process ends, or `close`."""

    def __init__(self, config: MonitorConfig, wait_s: float = 0.0) -> None:
        """`wait_s`: how long another process may still be at it. Raises BusyError, OSError."""
        self.config = config
        self.folder = Path(config.output_dir)
        self._lock = ExitStack()
        self._take_over(wait_s)
        self.records = Records(self.folder / RECORDS_FILE)
        self.collector = Collector(config, self.records)
        self.senders = [Sender(config, entry, self.records) for entry in config.monitors]
        self._asked = threading.Event()
        self._told = ""
        self._swept = 0
        self._collects_again = True

    def run(self) -> int:
        for number in stop_signals():
            signal.signal(number, lambda *_: self._asked.set())
        self._collect()
        if self._is_over() and self._nothing_left():
            log.info("everything has been sent already")
            self._tell()
            return 0
        for sender in self.senders:
            sender.start()
        while not (self._is_over() or self._asked.wait(LOOK_EVERY_S)):
            self._collect()
            self._sweep()
            self._tell()
        return self._end()

    def _sweep(self) -> None:
        """Removes samples that every monitor has."""
        passed = min((sender.passed for sender in self.senders), default=0)
        while self._swept < passed:
            record = self.records[self._swept]
            if record.kind == "extras":
                try:
                    extras.path_of(self.folder, record.step).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("%s", error)
            self._swept += 1

    def _take_over(self, wait_s: float) -> None:
        folder = (self.folder / RECORDS_FILE).parent
        try:
            self._lock.enter_context(locked(folder))
        except BusyError:
            if not wait_s:
                raise
            log.info("another process sends what is in %s; waiting up to %.0f s for it", folder, wait_s)
            self._lock.enter_context(locked(folder, wait_s))

    def close(self) -> None:
        self.records.close()
        self._lock.close()

    def _is_over(self) -> bool:
        return (self.folder / END_FILE).is_file()

    def _collect(self, *, hurry: bool = False) -> None:
        try:
            self.collector.collect(hurry=hurry)
            self._collects_again = True
        except OSError as error:
            if self._collects_again:
                log.error("the run's records cannot be read: %s; trying again", error)
            self._collects_again = False

    def _end(self) -> int:
        """Sends what is left, within `finish_s`."""
        began = time.monotonic()
        # A long journal takes longer to read than there is time, and the end must be reported to the services.
        taking = threading.Thread(target=self._collect_the_rest, name="collecting", daemon=True)
        taking.start()
        taking.join(self.config.finish_s / 2)
        if taking.is_alive():
            log.error("the run's last records were not all read in time; the rest may not be sent")
        status, reason = self._how_it_ended()
        log.info("the run has ended (%s); sending what is left", status)
        for sender in self.senders:
            sender.end(status, reason)
        while any(sender.is_alive() for sender in self.senders) and time.monotonic() - began < self.config.finish_s:
            time.sleep(0.02)
        self._sweep()
        self._tell()
        for sender in self.senders:
            if sender.is_done:
                log.info("monitor %s has everything, %d records", sender.entry.name, sender.next)
            else:
                log.error("monitor %s: %s", sender.entry.name, self._left(sender))
        return 0 if all(sender.is_done for sender in self.senders) and not taking.is_alive() else 1

    def _collect_the_rest(self) -> None:
        began = time.monotonic()
        self._collect(hurry=True)
        # The journal may be a moment behind for steps that are looked for the first time.
        while self.collector.is_behind and time.monotonic() - began < min(LATE_S, self.config.finish_s):
            time.sleep(0.1)
            self._collect(hurry=True)

    def _how_it_ended(self) -> tuple[Status, str]:
        try:
            told = json.loads((self.folder / END_FILE).read_text(encoding="utf-8"))
            return told["status"], str(told["reason"])
        except (OSError, ValueError, LookupError, TypeError):
            return "crashed", "the launcher was killed"

    def _nothing_left(self) -> bool:
        return all(self._was_done(sender) for sender in self.senders)

    def _was_done(self, sender: Sender) -> bool:
        """Whether it was done before this process started."""
        status, _ = self._how_it_ended()
        return sender.finished == status and sender.next >= len(self.records)

    def _left(self, sender: Sender) -> str:
        left = len(self.records) - sender.next
        what = f"{left} of {len(self.records)} records were not sent" if left else "the end was not sent"
        return f"{what}: {sender.error or 'the time was over'}"

    def _tell(self) -> None:
        """For the launcher, which reads `monitor/status.json`."""
        monitors = {
            sender.entry.name: {
                "where": sender.told.get("where"),
                "sent": sender.next,
                "records": len(self.records),
                "is_done": sender.is_done or self._was_done(sender),
                "is_given_up": sender.is_given_up,
                "error": sender.error,
            }
            for sender in self.senders
        }
        content = json.dumps({"pid": os.getpid(), "monitors": monitors}, indent=1) + "\n"
        if content != self._told:
            try:
                write_text(self.folder / STATUS_FILE, content)
            except OSError as error:
                log.error("%s cannot be written: %s", STATUS_FILE, error)
            self._told = content
