"""A run whose folder is gone comes back from its store: a checkpoint, and the model folder of the same step. It
continues from there with a new journal; what it has logged and measured before that is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from primerl.runs.registry import Run
from primerl.runs.state import process_started
from primerl.stores.choice import store_of_run
from primerl.stores.entries import Entry, StoreError, listed, newest
from primerl.stores.store import Store
from primerl.stores.worker import note_stored
from primerl.train.checkpoint.files import whole_folder
from primerl.train.checkpoint.staging import identity_of

FOLDERS = {"checkpoint": "checkpoints", "weights": "weights"}
"""Folders of the kinds that are restored, in the run's folder."""


def is_gone(folder: Path) -> bool:
    """Whether nothing is left of a run's folder."""
    return not folder.is_dir() or not any(folder.iterdir())


def what_is_stored(run: Run) -> str:
    """What the store has of a run whose folder is gone, and what can be done with it; for users."""
    try:
        store = store_of_run(run.config)
        if store is None:
            return "it has no store"
        there = store.entries(run.id)
    except StoreError as error:
        return f"what its store has is unknown: {error}"
    found = f"the store {store.url} has {listed(there)}"
    if any(entry.goes_on for entry in there):
        return f"{found}; `primerl run resume {run.id}` fetches the newest checkpoint and resumes from there"
    begin = [entry for entry in there if entry.kind != "checkpoint"]
    if begin:
        return f'{found}; `checkpoint_id = "{max(begin, key=newest).id}"` begins another run from there'
    return found


def restore(run: Run, step: int | None, say: Callable[[str], None]) -> int:
    """Fetches the checkpoint of `step`, or the newest one, into the run's folder, of which nothing is left; returns its
    step. Raises StoreError, and OSError where the folder cannot be written."""
    store = store_of_run(run.config)
    if store is None:
        raise StoreError(f"{run.id}: its folder {run.output_dir} is gone, and it has no store; start it by its file")
    entries = _wanted(run, store, step)
    size = sum(entry.bytes for entry in entries) / 1e6
    step = entries[0].step
    say(
        f"the folder {run.output_dir} is gone; fetching {' and '.join(entry.id for entry in entries)} from {store.url} "
        f"({size:.1f} MB)"
    )
    _remove_halves(run.output_dir)
    with whole_folder(run.output_dir, replace=True) as folder:
        stored = {}
        for entry in entries:
            target = folder / FOLDERS[entry.kind] / f"step_{step}"
            target.mkdir(parents=True)
            store.download(entry, target)
            # It has them already.
            stored[f"{entry.kind}_step_{step}"] = identity_of(target)
        note_stored(folder, store.url, run.id, stored)
    say(
        f"resuming from step {step} with a new journal; metrics, evaluations and logs of before that were in the "
        "folder, and are lost"
    )
    return step


def _wanted(run: Run, store: Store, step: int | None) -> list[Entry]:
    """The checkpoint, and the weights of the same step where they are stored."""
    there = store.entries(run.id)
    checkpoints = [entry for entry in there if entry.kind == "checkpoint"]
    whole = [entry for entry in checkpoints if entry.goes_on]
    found = [entry for entry in whole if step in (None, entry.step)]
    if found:
        checkpoint = max(found, key=newest)
        return [checkpoint, *(e for e in there if e.kind == "weights" and e.step == checkpoint.step)]
    gone = f"{run.id}: its folder {run.output_dir} is gone, and "
    if whole:
        steps = ", ".join(str(entry.step) for entry in whole)
        raise StoreError(f"{gone}the store {store.url} has no checkpoint of step {step} to resume from; of: {steps}")
    if checkpoints:
        raise StoreError(
            f"{gone}the checkpoints in the store {store.url} hold the trainer's part alone, and without the "
            f"orchestrator's no run can be resumed: {what_is_stored(run)}"
        )
    raise StoreError(f"{gone}there is no checkpoint to resume from: {what_is_stored(run)}")


def _remove_halves(folder: Path) -> None:
    """What fetches that were killed have left next to the run's folder."""
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):
        pid = path.suffixes[-2].removeprefix(".")
        if pid.isdigit() and process_started(int(pid)) is None:
            shutil.rmtree(path)
