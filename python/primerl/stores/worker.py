"""`primerl store-worker`: copies what a run saves into the store, alongside training.

A process of its own: uploading hashes and copies gigabytes, which would hold up the launcher's watch over the others,
and a file system that hangs can be killed with it. One thread stages what the run saves
(`primerl.train.checkpoint.staging`), another uploads what is staged, in the order in which it was saved: while an
upload takes long or fails, newer ones are staged. An upload that was cut off is done again by the run's next start.

`run/store.end` (or SIGTERM, which one that has just been started would die of) means that nothing more will be saved:
it uploads what is there, and ends. What cannot be uploaded is tried again, ever more seldom, for `give_up_s`; then it
is named in `run/store.json`, and tried again at the next one's turn.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from primerl.config.errors.validation_errors import describe
from primerl.config.process_files.files import write_text
from primerl.config.schema.services import StoreWorkerConfig
from primerl.runs.state import process_started
from primerl.stores.choice import open_store
from primerl.stores.entries import SNAPSHOT, StoreError, begun_with
from primerl.stores.store import Store
from primerl.train.adapters.files import ADAPTER_CONFIG, ADAPTER_FOLDER
from primerl.train.checkpoint import staging
from primerl.train.checkpoint.step_folders import ORCHESTRATOR_FOLDER, saved_steps

log = logging.getLogger("primerl.store")

LOOK_EVERY_S = 0.5
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
PART_S = 30.0
"""How long a checkpoint waits for the orchestrator's part, which is written a moment after the trainer's."""
END = Path("run") / "store.end"
REPORT = Path("run") / "store.json"
DONE = Path("run") / "stored.json"
FAILED, BAD_INPUT = 1, 2


@dataclass
class Uploader:
    settings: StoreWorkerConfig
    store: Store
    ending: bool = False
    """Nothing more will be saved. Set by a signal's handler, so nothing that has a lock."""
    uploaded: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Why an upload failed, by the id that its entry would have."""

    def __post_init__(self) -> None:
        self.folder = Path(self.settings.output_dir)
        remove_unfinished(self.folder / staging.FOLDER)
        self._all_staged = threading.Event()
        self._lock = threading.RLock()
        self._taken: staging.Staged | None = None
        """What is being uploaded."""
        self._stored: dict[str, str] = self._read_done()
        self._seen: dict[str, str] = dict(self._stored)
        """Identities of what was staged, by label."""

    @cached_property
    def _begun_with(self) -> tuple[str, str]:
        """Hashes all of the model, once."""
        return begun_with(Path(self.settings.model))

    def run(self) -> int:
        with ThreadPoolExecutor(1, "uploads") as executor:
            uploading = executor.submit(self._upload)
            try:
                while not uploading.done():
                    over = self.ending or (self.folder / END).exists()  # read before looking for what there is
                    self.stage(last=over)
                    if over:
                        break
                    time.sleep(LOOK_EVERY_S)
            finally:
                self._all_staged.set()
            uploading.result()
        return FAILED if self.failed else 0

    def _read_done(self) -> dict[str, str]:
        """What earlier starts have stored there, or skipped for newer ones. They may have been cleaned up there since,
        and stay so."""
        try:
            found = json.loads((self.folder / DONE).read_text(encoding="utf-8"))
            ours = (found["url"], found["run"]) == (self.store.url, self.settings.run)
            return dict(found["stored"]) if ours else {}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def stage(self, *, last: bool) -> None:
        """What is whole and was not seen yet. `last`: with the last adapter, whatever its step."""
        for kind, name in (("checkpoint", "checkpoints"), ("weights", "weights")):
            for step, path in _steps(self.folder / name):
                self._stage(kind, step, path)
        published = _steps(self.folder / "broadcasts")
        saved = [(step, path / ADAPTER_FOLDER) for step, path in _steps(self.folder / "weights")]
        adapters = {step: path for step, path in published + saved if step and (path / ADAPTER_CONFIG).is_file()}
        interval = self.settings.adapters_interval
        for step, path in sorted(adapters.items()):
            if (interval and step % interval == 0) or (last and step == max(adapters)):
                self._stage("adapter", step, path)
        self._drop_superseded()

    def _stage(self, kind: str, step: int, path: Path) -> None:
        label = f"{kind}_step_{step}"
        try:
            identity = staging.identity_of(path)
            if self._seen.get(label) != identity:
                staging.link(self.folder, kind, step, path)
                self._seen[label] = identity
                self._drop_former(label, identity)
        except (OSError, shutil.Error) as error:
            # The run has deleted it meanwhile, so it does not need it either.
            log.warning("%s was not staged: %s", label, error)

    def _drop_former(self, label: str, identity: str) -> None:
        """What was staged of the same folder before something was added to it, or before it was saved again."""
        with self._lock:
            for one in staging.staged(self.folder):
                if one.label == label and one.identity != identity and one != self._taken:
                    staging.unstage(one)

    def _drop_superseded(self) -> None:
        """The store keeps so many of each kind: what waits behind as many newer ones would be deleted there, and would
        fill the disk here while the store is away."""
        with self._lock:
            waiting = [one for one in staging.staged(self.folder) if one != self._taken]
            for kind in {one.kind for one in waiting}:
                of_kind, keep = [one for one in waiting if one.kind == kind], self._keep(kind)
                for one in of_kind[:-keep] if keep > 0 else []:
                    self._note_done(one)
                    staging.unstage(one)
                    log.info("%s is not stored: newer ones are", one.label)

    def _keep(self, kind: str) -> int:
        return self.settings.adapters_keep if kind == "adapter" else self.settings.keep

    def _upload(self) -> None:
        """Runs on the other thread until everything that was staged was uploaded, or at least tried."""
        self._patiently("the store", lambda: self.store.remove_unfinished(self.settings.run))
        while True:
            last = self._all_staged.is_set()
            tried: set[Path] = set()
            while (one := self._take(tried)) is not None:
                tried.add(one.path)
                self._upload_one(one)
            self.report()
            if last:
                return
            self._all_staged.wait(LOOK_EVERY_S)

    def _take(self, tried: set[Path]) -> staging.Staged | None:
        """The oldest staged folder that is due."""
        with self._lock:
            waiting = staging.staged(self.folder)
            due = (one for one in waiting if one.path not in tried and self._is_due(one, waiting))
            self._taken = next(due, None)
            return self._taken

    def _is_due(self, one: staging.Staged, waiting: list[staging.Staged]) -> bool:
        """A checkpoint that lacks the orchestrator's part is staged again when it has it. One that has been followed by
        another will not get it any more."""
        if one.kind != "checkpoint" or self._all_staged.is_set():
            return True
        if any((one.path / ORCHESTRATOR_FOLDER).glob(f"*{SNAPSHOT}")):
            return True
        followed = any(other.kind == one.kind and other.saved > one.saved for other in waiting)
        return followed or time.time_ns() - one.saved > PART_S * 1e9

    def _upload_one(self, one: staging.Staged) -> None:
        name = f"{self.settings.run}/{one.kind}/step_{one.step}"

        def put() -> None:
            self.store.put(one.path, self.settings.run, one.kind, one.step, *self._begun_with)
            for old in self.store.keep_newest(self.settings.run, one.kind, self._keep(one.kind)):
                log.info("deleted %s: newer ones are kept", old.id)

        # The trainer, which stages some itself, does not know what an earlier start has uploaded.
        is_new = self._stored.get(one.label) != one.identity
        if is_new and not self._patiently(name, put):
            return
        if is_new:
            self._note_done(one)
            self.uploaded.append(name)
            log.info("stored %s", name)
        staging.unstage(one)
        self.report()

    def _note_done(self, one: staging.Staged) -> None:
        with self._lock:
            self._stored[one.label] = one.identity
            note_stored(self.folder, self.store.url, self.settings.run, self._stored)

    def _patiently(self, name: str, do: Callable[[], None]) -> bool:
        deadline, pause = time.monotonic() + self.settings.give_up_s, FIRST_RETRY_S
        while True:
            try:
                do()
                self.failed.pop(name, None)
                return True
            except StoreError as error:
                self.failed[name] = str(error)
                log.warning("%s is not stored yet: %s", name, error)
                self.report()
            if time.monotonic() + pause > deadline:
                log.error(
                    "%s: failed for %.0f s; not tried again before the next upload", name, self.settings.give_up_s
                )
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)

    def report(self) -> None:
        waiting = [one.label for one in staging.staged(self.folder)]
        content = {"url": self.store.url, "uploaded": self.uploaded, "waiting": waiting, "failed": self.failed}
        write_text(self.folder / REPORT, json.dumps(content, indent=1) + "\n")


def note_stored(folder: Path, url: str, run: str, stored: dict[str, str]) -> None:
    """In the run's folder: what is in the store already. `stored`: identities of the folders, by label."""
    (folder / DONE).parent.mkdir(exist_ok=True)
    write_text(folder / DONE, json.dumps({"url": url, "run": run, "stored": stored}, indent=1) + "\n")


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Complete folders: those that are being written have another name."""
    return [(step, folder / f"step_{step}") for step in saved_steps(folder)]


def remove_unfinished(staged: Path) -> None:
    """Removes what processes that have ended were linking there, or removing."""
    for path in staged.glob(".*"):
        pid = path.name.rpartition(".")[2]
        if not pid.isdigit() or int(pid) == os.getpid() or process_started(int(pid)) is None:
            shutil.rmtree(path)


def main(settings: dict[str, Any]) -> int:
    try:
        config = StoreWorkerConfig.model_validate(settings)
    except ValidationError as error:
        print(f"error: {describe(error, StoreWorkerConfig)}", file=sys.stderr)
        return BAD_INPUT
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uploader = Uploader(config, open_store(config.url))
    except StoreError as error:
        log.error("%s", error)
        return FAILED

    def end(*_: object) -> None:
        uploader.ending = True

    signal.signal(signal.SIGTERM, end)
    return uploader.run()
