"""`primerl doctor`: what this machine has, and what that means for a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from primerl.cli.arguments import CommandParser
from primerl.cli.run.common import add_json

if TYPE_CHECKING:
    from primerl.doctor.finding import Finding

MARKS = {"ok": " ", "note": "-", "problem": "!"}


def doctor(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl doctor",
        description="Shows what this machine has and what it means for a run: cores, memory, GPUs, versions that have "
        "to fit together, folders, ports, proxies. Exit code 1 where something keeps runs from starting.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs"), metavar="DIR", help="where runs are to write (default outputs)"
    )
    parser.add_argument("--online", action="store_true", help="also ask whether the hub and W&B answer (5 s at most)")
    add_json(parser)
    chosen = parser.parse_args(arguments)
    from primerl.doctor import folders, machine, network, packages

    found = [
        *machine.findings(),
        *packages.findings(),
        *folders.findings(chosen.folder),
        *network.findings(online=chosen.online),
    ]
    if chosen.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print("\n".join(_lines(found)))
    return 1 if any(one.level == "problem" for one in found) else 0


def _lines(found: list[Finding]) -> list[str]:
    """What it means stands below what was found."""
    width = max(len(one.about) for one in found)
    lines = []
    for one in found:
        lines.append(f"{MARKS[one.level]} {one.about.ljust(width)}  {one.found}")
        lines += [f"{' ' * (width + 4)}{one.advice}"] if one.advice else []
    counts = [(level, sum(one.level == level for one in found)) for level in ("problem", "note")]
    said = ", ".join(f"{count} {level}{'' if count == 1 else 's'} ({MARKS[level]})" for level, count in counts if count)
    return [*lines, "", f"{said}." if said else "Nothing is in the way of a run."]
