"""What a checkpoint store is: what runs have saved, beyond their own folders.

An [`Entry`][primerl.stores.entries.Entry] is READY when `put` returns, with all of its files, and `entries` lists
nothing else. What an upload that was cut off has left is removed by `remove_unfinished`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path

import xxhash

from primerl.runs.saved import Saved
from primerl.runs.state import private_folder
from primerl.stores.entries import Entry, StoreError, newest, origin
from primerl.train.checkpoint.files import whole_folder, write_text

ID = re.compile(r"(?P<run>[\w-]+)(/(?P<kind>checkpoint|weights|adapter))?(/step_(?P<step>\d+))?")


class Store(ABC):
    """Every method raises StoreError for whatever the service says."""

    url: str

    @abstractmethod
    def entries(self, run: str | None = None) -> list[Entry]:
        """What is READY, by run, step and kind."""

    @abstractmethod
    def put(self, folder: Path, run: str, kind: str, step: int, model: str, base: str = "") -> Entry:
        """Uploads all files below `folder`, in place of an entry of that name; READY when this returns."""

    @abstractmethod
    def download(self, entry: Entry, folder: Path) -> None:
        """The entry's files, each checked by its hash, into a folder that does not have its final name yet."""

    @abstractmethod
    def delete(self, entry: Entry) -> None:
        """Deletes it. From the first moment on it is not READY any more."""

    @abstractmethod
    def remove_run(self, run: str) -> None:
        """Whatever is left of a run without entries."""

    @abstractmethod
    def remove_unfinished(self, run: str) -> None:
        """What uploads that were cut off have left. No other process may be uploading for this run."""

    @abstractmethod
    def deployed(self, run: str | None = None) -> set[str]:
        """Ids of the adapters that are marked, which are never cleaned up."""

    @abstractmethod
    def mark_deployed(self, entry: Entry, *, deployed: bool) -> None: ...

    def saved(self, run: str) -> list[Saved]:
        deployed = self.deployed(run)
        return [
            Saved(
                e.step,
                e.kind,
                True,
                e.bytes,
                e.kind != "checkpoint",
                e.id + (" (deployed)" if e.id in deployed else ""),
            )
            for e in self.entries(run)
        ]

    def find(self, given: str) -> Entry:
        """The entry that `RUN`, `RUN/step_N` or `RUN/KIND/step_N` names: the newest, and weights rather than adapters.
        Raises StoreError, which names what there is."""
        match = ID.fullmatch(given)
        if match is None:
            raise StoreError(f"{given!r} is no id of the store; expected RUN, RUN/step_N or RUN/KIND/step_N")
        there = self.entries(match["run"])
        wanted = [e for e in there if match["kind"] in (None, e.kind) and match["step"] in (None, str(e.step))]
        if not wanted:
            known = ", ".join(entry.id for entry in there) or f"nothing of run {match['run']}"
            raise StoreError(f"{given!r} is not READY in the store {self.url}; there is {known}")
        # Where there are weights or an adapter too, a run cannot start with the checkpoint.
        wanted = [entry for entry in wanted if entry.kind != "checkpoint"] or wanted
        step = max(wanted, key=newest).step
        return max((entry for entry in wanted if entry.step == step), key=lambda entry: entry.kind == "weights")

    def fetch(self, entry: Entry) -> Path:
        """The entry's files in a folder of this machine, each checked by its hash; fetched once. The folder's path ends
        in the run and the step, by which it is shown."""
        digest = xxhash.xxh3_64_hexdigest(f"{self.url} {entry.data}".encode())
        target = private_folder("fetched") / digest / entry.run / f"step_{entry.step}"
        if not target.is_dir():
            with whole_folder(target, replace=True) as folder:
                self.download(entry, folder)
                write_text(origin(target), entry.manifest())
        return target

    def delete_run(self, run: str) -> list[Entry]:
        """Deletes all that the run has stored except what is deployed, which is returned."""
        deployed = self.deployed(run)
        stays = [entry for entry in self.entries(run) if entry.id in deployed]
        for entry in self.entries(run):
            if entry.id not in deployed:
                self.delete(entry)
        self.remove_unfinished(run)
        if not stays:
            self.remove_run(run)
        return stays

    def keep_newest(self, run: str, kind: str, count: int) -> list[Entry]:
        """Deletes the run's older entries of that kind except deployed ones; -1 keeps all. Returns the deleted ones."""
        there = sorted((entry for entry in self.entries(run) if entry.kind == kind), key=newest)
        deployed = self.deployed(run)
        old = [entry for entry in there[:-count] if entry.id not in deployed] if count > 0 else []
        for entry in old:
            self.delete(entry)
        return old
