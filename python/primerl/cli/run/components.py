"""`primerl run components`: the processes of a run, by their logs."""

from __future__ import annotations

import argparse
import json
import time

from primerl.cli.run.common import add_json, ago, parser_of, show, size, with_run
from primerl.config.errors.fail import fail
from primerl.runs.registry import Run


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "components", "Lists the processes of a run that have written a log; `primerl run logs ID -c NAME` prints one."
    )
    add_json(parser)
    return with_run(parser, arguments, _components, needs_folder=True)


def _components(run: Run, chosen: argparse.Namespace) -> int:
    folder = run.output_dir / "logs"
    found = []
    # Links name logs that are there by their own names.
    for path in sorted(path for path in folder.rglob("*.log") if not path.is_symlink()):
        about = path.stat()
        found.append((str(path.relative_to(folder).with_suffix("")), about.st_mtime, about.st_size, path))
    if chosen.json:
        names = ("name", "last_line", "bytes", "log")
        print(json.dumps([dict(zip(names, (*row[:3], str(row[3])), strict=True)) for row in found], indent=2))
        return 0
    if not found:
        return fail(f"{folder} has no log yet", title="No processes")
    rows = [[name, f"{ago(time.time() - at)} ago", size(count)] for name, at, count, _ in found]
    show(["name", "last line", "log"], rows, right=(2,))
    return 0
