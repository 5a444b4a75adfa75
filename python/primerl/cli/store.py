"""`primerl store`: what is stored, of which runs, and how it is deleted."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from primerl.cli.arguments import CommandParser
from primerl.cli.run.common import BAD_INPUT, FAILED, add_json, ago, show, size
from primerl.config.errors.fail import fail
from primerl.runs.registry import Registry, Run, known
from primerl.runs.state import StateError
from primerl.stores.choice import open_store, store_of_run
from primerl.stores.entries import Entry, StoreError, listed
from primerl.stores.store import ID, Store

USAGE = """usage: primerl store list [--store URL] [--json]             what is stored, by run
       primerl store delete RUN[/KIND][/step_N] [--yes]     delete that; deployed adapters stay
       primerl store prune [--store URL] [--dry-run]        delete what runs have stored that are in no list any more

`primerl store WORD --help` has each word's options."""
NOTHING = "Nothing was deleted"


def store(arguments: list[str]) -> int:
    words = {"list": _list, "ls": _list, "delete": _delete, "prune": _prune}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else BAD_INPUT
    if arguments[0] not in words:
        return fail(f"`primerl store` has no word {arguments[0]!r}; there are list, delete and prune", title=NOTHING)
    try:
        return words[arguments[0]](arguments[1:])
    except (StoreError, StateError) as error:
        return fail(str(error), title="The store cannot be used")


@dataclass(frozen=True)
class Stored:
    """What one store has of one run."""

    store: Store
    run: str
    entries: list[Entry]
    deployed: set[str]
    """Ids."""
    known: Run | None

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def described(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "name": None if self.known is None else self.known.name,
            "listed": self.known is not None,
            "store": self.store.url,
            "bytes": self.bytes,
            "newest": max(entry.stored for entry in self.entries),
            "entries": [entry.id for entry in self.entries],
            "deployed": sorted(self.deployed),
        }


def all_stored(url: str | None) -> list[Stored]:
    """What is in the store at the URL; default: in the state folder's store and those of the runs in the list.
    Raises StoreError and StateError."""
    with Registry(reading=True) as registry:
        runs = {run.id: run for run in registry.all()}
    stores = [open_store(url)]
    if url is None:
        stores += [found for run in runs.values() if (found := store_of_run(run.config)) is not None]
    stored = []
    for one in {one.url: one for one in stores}.values():
        entries, deployed = one.entries(), one.deployed()
        for name in dict.fromkeys(entry.run for entry in entries):
            own = [entry for entry in entries if entry.run == name]
            stored.append(Stored(one, name, own, deployed & {entry.id for entry in own}, runs.get(name)))
    return stored


def _list(arguments: list[str]) -> int:
    parser = _parser(
        "list", "Lists what is stored, by run. A run that is in no list was deleted, or belongs to another machine."
    )
    add_json(parser)
    chosen = parser.parse_args(arguments)
    found = all_stored(chosen.store)
    if chosen.json:
        print(json.dumps([one.described() for one in found], indent=2))
    elif found:
        header = ["run", "name", "what", "size", "stored", "deployed", "store"]
        show(header, [_row(one) for one in found], right=(3,), optional=(6,))
    else:
        print("nothing is stored")
    return 0


def _row(one: Stored) -> list[Any]:
    name = "in no list" if one.known is None else one.known.name
    newest = f"{ago(time.time() - max(entry.stored for entry in one.entries))} ago"
    deployed = ", ".join(sorted(name.removeprefix(f"{one.run}/") for name in one.deployed))
    return [one.run, name, listed(one.entries), size(one.bytes), newest, deployed, one.store.url]


def _delete(arguments: list[str]) -> int:
    parser = _parser("delete", "Deletes what a run has stored, or a kind or a step of it. Deployed adapters stay.")
    parser.add_argument("id", metavar="ID", help="RUN, RUN/step_N, RUN/KIND or RUN/KIND/step_N")
    parser.add_argument("-y", "--yes", "-f", "--force", action="store_true", help="do not ask")
    chosen = parser.parse_args(arguments)
    name, slash, rest = chosen.id.partition("/")
    run = known(name)
    given = chosen.id if run is None else run.id + slash + rest
    of_run = None if chosen.store is not None or run is None else store_of_run(run.config)
    store = of_run or open_store(chosen.store)
    match = ID.fullmatch(given)
    if match is None:
        return fail(f"{given!r} is no id of the store; expected RUN, RUN/step_N or RUN/KIND/step_N", title=NOTHING)
    there = store.entries(match["run"])
    wanted = [e for e in there if match["kind"] in (None, e.kind) and match["step"] in (None, str(e.step))]
    if not wanted:
        return fail(f"the store {store.url} has {listed(there)}, and no {given!r}", title=NOTHING)
    deployed = store.deployed(match["run"])
    goes = [entry for entry in wanted if entry.id not in deployed]
    what = f"{listed(goes)} ({size(sum(entry.bytes for entry in goes))}) of {match['run']} in {store.url}"
    if goes and not _agreed(what, yes=chosen.yes):
        return FAILED if sys.stdin.isatty() else BAD_INPUT
    for entry in goes:
        store.delete(entry)
    if goes:
        print(f"deleted {what}")
    for entry in wanted:
        if entry.id in deployed:
            print(f"{entry.id} stays: it is deployed (`primerl undeploy {entry.run}/step_{entry.step}` first)")
    return 0 if goes else FAILED


def _prune(arguments: list[str]) -> int:
    parser = _parser(
        "prune",
        "Deletes what is stored of runs that are no longer in the list, except deployed adapters: in the store in the "
        "state folder, or the one at --store. Runs of other machines that use the same store are not in the list here.",
    )
    parser.add_argument("--dry-run", action="store_true", help="list it, and delete nothing")
    parser.add_argument("-y", "--yes", "-f", "--force", action="store_true", help="do not ask")
    chosen = parser.parse_args(arguments)
    store = open_store(chosen.store)
    goes = [one for one in all_stored(store.url) if one.known is None]
    if not goes:
        print(f"every run that has something in {store.url} is in the list")
        return 0
    show(["run", "name", "what", "size", "stored", "deployed", "store"], [_row(one) for one in goes], right=(3,))
    total = f"{size(sum(one.bytes for one in goes))} of {len(goes)} runs in {store.url}"
    if chosen.dry_run:
        print(f"{total} would be deleted, but for what is deployed")
        return 0
    if not _agreed(total, yes=chosen.yes):
        return FAILED if sys.stdin.isatty() else BAD_INPUT
    stays = [entry.id for one in goes for entry in store.delete_run(one.run)]
    print(f"deleted {total}" + (f", but for {', '.join(stays)}: deployed" if stays else ""))
    return 0


def _parser(word: str, description: str) -> CommandParser:
    parser = CommandParser(prog=f"primerl store {word}", description=description, allow_abbrev=False)
    parser.add_argument("--store", metavar="URL", help="which one, where it is not the run's or the state folder's")
    return parser


def _agreed(what: str, *, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        fail(f"to delete {what}, say so with --yes", title=NOTHING)
        return False
    return input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")
