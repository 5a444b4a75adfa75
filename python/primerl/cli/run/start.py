"""`primerl rl` and `primerl run @ rl.toml`: a run in the foreground; with `-d` in a session of its own."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

from primerl.cli.arguments import keep_state
from primerl.cli.services import started_with
from primerl.config.command_line.arguments import PUBLISHED, with_long_names
from primerl.forking import preload, servers
from primerl.launch.preflight import checker
from primerl.process import signals

FAILED = 1
DETACH = ("-d", "--detach")
PLAN, AS_JSON = "--plan", "--json"
PAGE_S = 30.0
"""From the end of the checks until the orchestrator listens."""
POLL_S = 0.1


def main(arguments: list[str]) -> int:
    rest = [argument for argument in arguments if argument not in DETACH]
    detached = len(rest) < len(arguments) and PLAN not in rest
    if rest and not rest[0].startswith(("@", "-")):
        rest.insert(0, "@")
    if not detached or "--help" in rest or "-h" in rest:
        return start_rl(rest)
    return detach(rest, Path.cwd())


def show_plan(arguments: list[str]) -> int:
    """Where the processes would be, and whether they fit; starts nothing, and writes nothing."""
    from primerl.config.errors.error_locations import placed
    from primerl.config.errors.fail import ConfigError, fail
    from primerl.config.hosted.load_run import is_short, load_run
    from primerl.config.process_files import run_file
    from primerl.launch import plan

    as_json = AS_JSON in arguments
    try:
        rest = with_long_names(started_with([argument for argument in arguments if argument != AS_JSON]), PUBLISHED)
        given = load_run(rest, program="primerl rl")
        with placed(given, rest, short=is_short(rest)):
            return plan.show(run_file.located(given), as_json=as_json)
    except ConfigError as error:
        return fail(str(error))


def start_rl(arguments: list[str], *, form: str | None = None) -> int:
    """`form`: that which the config was given in first, where it is the stored copy of a run's."""
    if PLAN in arguments:
        return show_plan([argument for argument in arguments if argument != PLAN])
    from primerl.config.errors.fail import ConfigError, fail

    try:
        arguments = with_long_names(started_with(arguments), PUBLISHED)
    except ConfigError as error:
        return fail(str(error))
    with checker.environments_ahead(arguments):
        with signals.held():
            from primerl.config.errors.error_locations import placed
            from primerl.config.hosted.load_run import is_short, load_run
            from primerl.config.process_files import run_file
        try:
            given = load_run(arguments, program="primerl rl")
            short = is_short(arguments)
            with placed(given, arguments, short=short):
                config = run_file.located(given)
            keep_state(config.output_dir)
            servers.begin(config.fork_server, *([] if config.dry_run else [preload.TORCH]))
            with signals.held():
                from primerl.launch import run

            with placed(config, arguments, short=short):
                return run.run(config, form=form or ("hosted" if short else "full"))
        except ConfigError as error:
            return fail(str(error))


def detach(arguments: list[str], folder: Path) -> int:
    """Starts `primerl rl ARGUMENTS` in `folder` in the background; prints the id."""
    from primerl.config.errors.fail import fail
    from primerl.launch.supervise import detached
    from primerl.runs.state import StateError

    print("checking; the run goes to the background when it begins", file=sys.stderr, flush=True)
    began = time.time()
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
    print(started.run_id, flush=True)
    print(f"`primerl run logs {started.run_id} -f` follows it", file=sys.stderr, flush=True)
    page = _page(started.run_id, began)
    if page is not None:
        print(f"the run's page: {page}", file=sys.stderr)
    return 0


def _page(run_id: str, began: float) -> str | None:
    """The address of its page, once its orchestrator listens; None where that takes too long, or it has none."""
    from primerl.launch.report import addresses
    from primerl.launch.supervise.lock import in_use
    from primerl.runs.registry import known
    from primerl.runs.state import StateError

    try:
        run = known(run_id)
    except StateError:
        return None
    if run is None or run.kind != "rl":
        return None
    file = run.output_dir / "run" / "orchestrator.json"
    deadline = time.monotonic() + PAGE_S
    while in_use(run.output_dir) and time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, LookupError):
            if file.stat().st_mtime >= began:
                url = json.loads(file.read_text(encoding="utf-8"))["url"]
                return addresses.page(url, run.output_dir, is_seen_once=sys.stderr.isatty())
        time.sleep(POLL_S)
    return None
