"""`primerl env prune`: removes the virtualenvs that primerl made for environments and that are no longer needed."""

from __future__ import annotations

import json
import sys
from typing import Any

from primerl.cli.arguments import CommandParser
from primerl.cli.run.common import FAILED, add_json, show, size
from primerl.config.errors.fail import fail
from primerl.runs.state import StateError


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl env prune",
        allow_abbrev=False,
        description="Removes the virtualenvs that primerl made of environments' `python.requirements`, except those "
        "that a listed run needs, that a process runs in, or that were requested within the last hour. What a later "
        "run needs is installed again.",
    )
    parser.add_argument("--dry-run", action="store_true", help="list them all, with their sizes, and remove nothing")
    add_json(parser)
    chosen = parser.parse_args(arguments)
    from primerl.launch.interpreters import pruning

    try:
        found = pruning.found()
    except (StateError, OSError) as error:
        return fail(str(error), title="Nothing was removed")
    if not found and chosen.json:
        print("[]")
        return 0
    if not found:
        print("there are no virtualenvs that primerl made")
        return 0
    freed, left = 0, False
    rows: list[list[Any]] = []
    told: list[dict[str, Any]] = []
    for made in found:
        says = f"stays: {made.needed}" if made.needed else "would be removed"
        if not chosen.dry_run and not made.needed:
            try:
                removed = pruning.remove(made)
                says = "removed" if removed else "stays: needed by now"
            except OSError as error:
                print(f"{made.folder} could not be removed: {error}", file=sys.stderr)
                removed, left, says = False, True, "not removed"
            freed += made.size if removed else 0
        freed += made.size if chosen.dry_run and not made.needed else 0
        rows.append([made.folder.name, size(made.size), says, ", ".join(made.requirements) or "-"])
        told.append(
            {"folder": str(made.folder), "bytes": made.size, "what": says, "requirements": list(made.requirements)}
        )
    if chosen.json:
        print(json.dumps(told, indent=2))
        return FAILED if left else 0
    show(["virtualenv", "size", "what", "requirements"], rows, right=(1,))
    print(f"{size(freed)} {'would be' if chosen.dry_run else 'were'} freed in {found[0].folder.parent}")
    return FAILED if left else 0
