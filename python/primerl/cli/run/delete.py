"""`primerl run delete`."""

from __future__ import annotations

import argparse
import shutil
import sys

from primerl.cli.run.common import FAILED, parser_of, with_run
from primerl.config.complaint import fail
from primerl.launch.lock import LOCK, in_use, take
from primerl.runs.registry import Registry, Run


def main(arguments: list[str]) -> int:
    parser = parser_of("delete", "Takes a run out of the list; its folder stays, unless --with-files is given.")
    parser.add_argument("--with-files", action="store_true", help="delete the run's folder too")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return with_run(parser, arguments, _delete)


def _delete(run: Run, chosen: argparse.Namespace) -> int:
    folder = run.output_dir
    if in_use(folder):
        return fail(f"{run.id} is running; `primerl run stop {run.id}` first", title="Nothing was deleted")
    deletes = chosen.with_files and folder.exists()
    if deletes and not (folder / LOCK).is_file():
        return fail(f"{folder} does not look like the folder of a run; delete it yourself", title="Nothing was deleted")
    what = f"{run.id} ({run.name}){f', and all of {folder}' if deletes else ''}"
    if not chosen.yes:
        if not sys.stdin.isatty():
            return fail(f"to delete {what}, say so with --yes", title="Nothing was deleted")
        if input(f"delete {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return FAILED
    if deletes:
        try:
            with (folder / LOCK).open() as file:
                # It may have been started while the question was open.
                if not take(file):
                    return fail(f"{run.id} is running by now", title="Nothing was deleted")
                shutil.rmtree(folder)
        except OSError as error:
            print(f"{folder} could not be deleted: {error}; the run stays in the list", file=sys.stderr)
            return FAILED
    with Registry() as registry:
        registry.delete(run.id)
    print(f"deleted {what}" if deletes else f"deleted {what} from the list; its folder {folder} stays")
    return 0
