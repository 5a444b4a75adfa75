"""`primerl run components`: the processes of a run, by their logs."""

from __future__ import annotations

import argparse
import time

from primerl.cli.run.common import ago, parser_of, show, size, with_run
from primerl.config.errors.fail import fail
from primerl.runs.registry import Run


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "components", "Lists the processes of a run that have written a log; `primerl run logs ID -c NAME` prints one."
    )
    return with_run(parser, arguments, _components, needs_folder=True)


def _components(run: Run, _: argparse.Namespace) -> int:
    folder = run.output_dir / "logs"
    rows = []
    # Links name logs that are there by their own names.
    for path in sorted(path for path in folder.rglob("*.log") if not path.is_symlink()):
        about = path.stat()
        name = path.relative_to(folder).with_suffix("")
        rows.append([name, f"{ago(time.time() - about.st_mtime)} ago", size(about.st_size)])
    if not rows:
        return fail(f"{folder} has no log yet", title="No processes")
    show(["name", "last line", "log"], rows, right=(2,))
    return 0
