"""`primerl store-worker`: copies what a run saves into the store, beside training.

A process of its own: uploading hashes and copies gigabytes, which would hold up the launcher's watch over the others,
and a file system that hangs can be killed with it. What the run saves is linked (not copied) to `run/store/` the moment
it is whole, so that the run may delete its own while the upload goes on, and an upload that was cut off is done again
by the run's next start.

SIGTERM means that nothing more will be saved: it uploads what is there, and ends. What cannot be uploaded is tried
again, ever more seldom, for `give_up_s`; then it is named in `run/store.json`, and tried again at the next one's turn.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl.config.resolve import write_text
from primerl.runs.saved import ADAPTER_FOLDER
from primerl.runs.store import Store, StoreError, model_digest
from primerl.train.adapter_files import ADAPTER_CONFIG

log = logging.getLogger("primerl.store")

LOOK_EVERY_S = 0.5
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
REPORT = Path("run") / "store.json"
STAGED = Path("run") / "store"
DONE = Path("run") / "stored.json"
STAGED_NAME = re.compile(r"(checkpoint|weights|adapter)_step_(\d+)")
FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Contents of `configs/store.toml`."""

    run: str
    output_dir: str
    model: str
    """Model folder that the run began with."""
    url: str | None = None
    keep: int = 5
    adapters_interval: int = 0
    adapters_keep: int = 3
    give_up_s: float = 600.0


@dataclass
class Uploader:
    settings: Settings
    store: Store
    ending: threading.Event = field(default_factory=threading.Event)
    """Set when nothing more will be saved."""
    uploaded: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by the id it would have."""
    _seen: dict[str, str] = field(default_factory=dict)
    """What was staged, by name: a run that went back saves the same step again, and another folder."""

    def __post_init__(self) -> None:
        self.folder = Path(self.settings.output_dir)
        self.staged = self.folder / STAGED
        self.staged.mkdir(parents=True, exist_ok=True)
        for cut_off in self.staged.glob(".*"):
            shutil.rmtree(cut_off)
        self._stored: dict[str, str] = self._read_done()
        self._seen |= self._stored

    def run(self) -> int:
        self._patiently("the store", lambda: self.store.remove_unfinished(self.settings.run))
        while True:
            over = self.ending.is_set()  # before it is looked what there is
            self.stage(last=over)
            self.upload()
            self.report()
            if over:
                return FAILED if self.failed else 0
            self.ending.wait(LOOK_EVERY_S)

    def _read_done(self) -> dict[str, str]:
        """What earlier starts have stored there. Older ones may have been cleaned up there since, and stay so."""
        try:
            found = json.loads((self.folder / DONE).read_text())
            return dict(found["stored"]) if found["url"] == self.store.url else {}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def stage(self, *, last: bool) -> None:
        """Links what is whole and was not seen yet. `last`: with the last adapter, whatever its step."""
        for kind, name in (("checkpoint", "checkpoints"), ("weights", "weights")):
            for step, path in _steps(self.folder / name):
                self._link(kind, step, path)
        published = _steps(self.folder / "broadcasts")
        saved = [(step, path / ADAPTER_FOLDER) for step, path in _steps(self.folder / "weights")]
        adapters = {step: path for step, path in published + saved if step and (path / ADAPTER_CONFIG).is_file()}
        interval = self.settings.adapters_interval
        for step, path in sorted(adapters.items()):
            if (interval and step % interval == 0) or (last and step == max(adapters)):
                self._link("adapter", step, path)

    def _link(self, kind: str, step: int, path: Path) -> None:
        name, temporary = f"{kind}_step_{step}", self.staged / f".{kind}_step_{step}"
        try:
            facts = path.stat()
            identity = f"{facts.st_ino} {facts.st_mtime_ns}"
            if self._seen.get(name) == identity:
                return
            shutil.copytree(path, temporary, copy_function=_link_or_copy)
            shutil.rmtree(self.staged / name, ignore_errors=True)
            temporary.rename(self.staged / name)
            self._seen[name] = identity
        except (OSError, shutil.Error) as error:
            # The run has deleted it meanwhile: what it does not keep for so long it does not miss either.
            shutil.rmtree(temporary, ignore_errors=True)
            log.warning("%s was not stored: %s", name, error)

    def upload(self) -> None:
        """All that is staged, in order of steps."""
        matches = [match for path in self.staged.iterdir() if (match := STAGED_NAME.fullmatch(path.name))]
        for match in sorted(matches, key=lambda found: (int(found[2]), found[1])):
            kind, step, path = match[1], int(match[2]), self.staged / match[0]
            name = f"{self.settings.run}/{kind}/step_{step}"

            def put(kind: str = kind, step: int = step, path: Path = path) -> None:
                self.store.put(path, self.settings.run, kind, step, model_digest(Path(self.settings.model)))
                keep = self.settings.adapters_keep if kind == "adapter" else self.settings.keep
                for old in self.store.keep_newest(self.settings.run, kind, keep):
                    log.info("deleted %s: newer ones are kept", old.id)

            if self._patiently(name, put):
                shutil.rmtree(path)
                self._note_done(match[0])
                self.uploaded.append(name)
                log.info("stored %s", name)
                self.report()

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
                log.error("%s: given up after %.0f s, until the next one is stored", name, self.settings.give_up_s)
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)

    def _note_done(self, name: str) -> None:
        if name in self._seen:  # else an earlier start staged it: whether it is the same as now is found out next
            self._stored[name] = self._seen[name]
            content = {"url": self.store.url, "stored": self._stored}
            write_text(self.folder / DONE, json.dumps(content, indent=1) + "\n")

    def report(self) -> None:
        waiting = sorted(path.name for path in self.staged.iterdir() if STAGED_NAME.fullmatch(path.name))
        content = {"url": self.store.url, "uploaded": self.uploaded, "waiting": waiting, "failed": self.failed}
        write_text(self.folder / REPORT, json.dumps(content, indent=1) + "\n")


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Whole folders: those that are being written have another name."""
    from primerl.train.step_folders import saved_steps

    return [(step, folder / f"step_{step}") for step in saved_steps(folder)]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)  # a file system without hard links


def main(settings: dict[str, Any]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    chosen = Settings(**settings)
    try:
        uploader = Uploader(chosen, Store(chosen.url))
    except StoreError as error:
        log.error("%s", error)
        return FAILED
    signal.signal(signal.SIGTERM, lambda *_: uploader.ending.set())
    return uploader.run()
