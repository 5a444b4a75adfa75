"""`primerl run @ rl.toml`: as `primerl rl`; with `-d` in a session of its own."""

from __future__ import annotations

import sys
from pathlib import Path

FAILED = 1
DETACH = ("-d", "--detach")


def main(arguments: list[str]) -> int:
    rest = [argument for argument in arguments if argument not in DETACH]
    detached = len(rest) < len(arguments)
    if rest and not rest[0].startswith(("@", "-")):
        rest.insert(0, "@")
    if not detached or "--help" in rest or "-h" in rest:
        from primerl.cli.runs import start_rl

        return start_rl(rest)
    return detach(rest, Path.cwd())


def detach(arguments: list[str], folder: Path) -> int:
    """Starts `primerl rl ARGUMENTS` in `folder` in the background; prints the id."""
    from primerl.config.errors.fail import fail
    from primerl.launch.supervise import detached
    from primerl.runs.state import StateError

    print("checking; the run goes to the background when it begins", file=sys.stderr, flush=True)
    try:
        started = detached.start(arguments, folder)
    except StateError as error:
        return fail(str(error))
    if not started.started:
        # A dry run ends well, and says on its output what was checked.
        print(started.said, end="", file=sys.stderr if started.code else sys.stdout)
        return FAILED if started.code is None or started.code < 0 else started.code
    if started.run_id is None:
        print(f"started as process {started.pid}, but the list of runs cannot be written: see the run's launcher.log")
        return 0
    print(started.run_id)
    print(f"`primerl run logs {started.run_id} -f` follows it", file=sys.stderr)
    return 0
