"""What there is to tell, in one order that no restart changes: `monitor/records.jsonl`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from primerl.launch.supervise.lock import take

LOCK = "lock"
Kind = Literal["metrics", "evaluation", "extras"]


@dataclass(frozen=True, slots=True)
class Record:
    number: int
    kind: Kind
    step: int
    values: dict[str, Any]
    """Metrics by name; of `extras` nothing: they are in a file of their own."""


class Records:
    """Appended to by one thread, read by several. A record counts once it is on the disk."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        self._grown = threading.Condition()
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        self._offsets = [0]  # where each record begins, and where the next one will
        with file.open("rb") as content:
            for line in content:
                if not line.endswith(b"\n"):
                    break  # half a record, which a kill has left
                self._offsets.append(self._offsets[-1] + len(line))
        os.ftruncate(self._descriptor, self._offsets[-1])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Record]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Record:
        begin, end = self._offsets[number], self._offsets[number + 1]
        found = json.loads(os.pread(self._descriptor, end - begin, begin))
        return Record(number, found["kind"], found["step"], found["values"])

    def append(self, kind: Kind, step: int, values: dict[str, Any]) -> None:
        """Raises OSError; nothing is half appended then."""
        line = json.dumps({"kind": kind, "step": step, "values": values}).encode() + b"\n"
        begin = self._offsets[-1]
        written = 0
        while written < len(line):
            written += os.pwrite(self._descriptor, line[written:], begin + written)
        os.fsync(self._descriptor)
        with self._grown:
            self._offsets.append(begin + len(line))
            self._grown.notify_all()

    def wait(self, number: int, timeout_s: float) -> bool:
        """Whether that record exists; waits for it up to that time."""
        with self._grown:
            return self._grown.wait_for(lambda: number < len(self), timeout_s)

    def wake(self) -> None:
        """Wakes all waiting threads."""
        with self._grown:
            self._grown.notify_all()

    def close(self) -> None:
        os.close(self._descriptor)


class BusyError(Exception):
    """Another process serves the monitors of the run."""


@contextmanager
def locked(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """While the block lasts, or the process, no other process uses the `monitor` folder: two would append to one file,
    and send all of it twice. Raises BusyError where another still is after that time, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with (folder / LOCK).open("a", encoding="utf-8") as file:
        while not take(file):
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"another process sends what is in {folder}: the run is running, or `primerl monitor` was started "
                    "twice; wait for it to end"
                )
        yield


def last_step(file: Path) -> int:
    """The last step whose metrics are in that file of records; -1 where there is none."""
    records = Records(file)
    try:
        return max((record.step for record in records if record.kind == "metrics"), default=-1)
    finally:
        records.close()


class Tail:
    """Lines of JSON that are appended to a file, each once it is whole. A file that is replaced, or cut, is read again:
    the reader knows what it has had."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def lines(self) -> list[dict[str, Any]]:
        try:
            with self.file.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                if identity != self._identity or found.st_size < self._offset:
                    self._identity, self._offset = identity, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue  # what a disk that failed has left; the trainer removes it when it resumes
            if isinstance(value, dict):
                lines.append(value)
        return lines
