"""`primerl run delete`."""

from __future__ import annotations

import argparse
import shutil
import sys

from primerl.cli.run.common import FAILED, parser_of, size, with_run
from primerl.config.errors.fail import fail
from primerl.launch.slurm import jobs
from primerl.launch.supervise.lock import LOCK, in_use, take
from primerl.runs.registry import Registry, Run
from primerl.stores.choice import store_of_run
from primerl.stores.entries import StoreError
from primerl.stores.store import Store
from primerl.stores.worker import DONE

NOTHING = "Nothing was deleted"


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "delete",
        "Removes a run from the list. Its folder stays unless --with-files is given, and what it has stored unless "
        "--with-stored is given.",
    )
    parser.add_argument("--with-files", action="store_true", help="delete the run's folder too")
    parser.add_argument(
        "--with-stored", action="store_true", help="delete what it has stored too, except deployed adapters"
    )
    parser.add_argument("-y", "--yes", "-f", "--force", action="store_true", help="do not ask")
    return with_run(parser, arguments, _delete)


def _delete(run: Run, chosen: argparse.Namespace) -> int:
    folder = run.output_dir
    if in_use(folder):
        return fail(f"{run.id} is running; `primerl run stop {run.id}` first", title=NOTHING)
    if (said := jobs.in_the_way(folder)) is not None:
        return fail(f"{run.id}: {said} (`primerl run stop {run.id}`)", title=NOTHING)
    deletes = chosen.with_files and folder.exists()
    if deletes and not (folder / LOCK).is_file():
        return fail(f"{folder} does not look like the folder of a run; delete it yourself", title=NOTHING)
    try:
        store, bytes_ = _stored(run)
    except StoreError as error:
        if chosen.with_stored:
            return fail(str(error), title=NOTHING)
        store, bytes_ = None, 0
    stored = "" if store is None or not bytes_ else f"{size(bytes_)} in the store {store.url}"
    also = [f"all of {folder}"] * deletes + [stored] * bool(chosen.with_stored and stored)
    what = f"{run.id} ({run.name}){', and ' if also else ''}{', and '.join(also)}"
    if not chosen.yes:
        if not sys.stdin.isatty():
            return fail(f"to delete {what}, say so with --yes", title=NOTHING)
        if input(f"delete {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return FAILED
    if deletes:
        try:
            with (folder / LOCK).open(encoding="utf-8") as file:
                # It may have been started while the question was open.
                if not take(file):
                    return fail(f"{run.id} is running by now", title=NOTHING)
                shutil.rmtree(folder)
        except OSError as error:
            print(f"{folder} could not be deleted: {error}; the run stays in the list", file=sys.stderr)
            return FAILED
    stays = []
    if chosen.with_stored and store is not None:
        try:
            stays = [f"{entry.id} stays stored: it is deployed" for entry in store.delete_run(run.id)]
            (folder / DONE).unlink(missing_ok=True)  # what the folder still has is stored again by another start
        except StoreError as error:
            print(f"what {run.id} has stored could not be deleted: {error}; the run stays in the list", file=sys.stderr)
            return FAILED
    elif stored:
        stays = [f"{stored} stay; `primerl store delete {run.id}` deletes them"]
    with Registry() as registry:
        registry.delete(run.id)
    left = "" if deletes else f"; its folder {folder} {'stays' if folder.exists() else 'is gone'}"
    print("\n".join([f"deleted {what}{' from the list' if left else ''}{left}", *stays]))
    return 0


def _stored(run: Run) -> tuple[Store | None, int]:
    """The run's store, and how many bytes it has of the run."""
    store = store_of_run(run.config)
    return store, 0 if store is None else sum(entry.bytes for entry in store.entries(run.id))
