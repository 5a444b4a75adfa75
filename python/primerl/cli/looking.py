"""`primerl top` and `primerl page`: looking at a run, in the terminal and in the browser."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from pathlib import Path

from primerl.cli.arguments import CommandParser
from primerl.config.errors.fail import fail
from primerl.process.signals import awaited

FAILED = 1
NOT_A_PORT = "expected a port from 0 (any free one) to 65535"


def meant(given: str) -> str:
    """A run of that very id or name comes before a folder of that name in the working directory, which `./NAME` is."""
    if os.sep in given or not Path(given).is_dir():
        return given
    from primerl.runs.registry import known
    from primerl.runs.state import StateError

    try:
        run = known(given)
    except StateError:
        return given
    if run is None or given not in (run.id, run.name) or not run.output_dir.is_dir():
        return given
    if not run.output_dir.samefile(given):
        print(f"{given} is run {run.id}, in {run.output_dir}; give ./{given} for the folder here", file=sys.stderr)
    return os.fspath(run.output_dir)


def top(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl top",
        description="Shows what a run does now, in the terminal: curves, where the time goes, engines, waits. "
        "Ctrl-C leaves it; the run continues.",
    )
    parser.add_argument("run", help="output folder of a run, its id, or the URL of its orchestrator")
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="SECONDS", help="seconds between updates (1)")
    chosen = parser.parse_args(arguments)
    from primerl.runs import top as view

    run = meant(chosen.run)
    try:
        url = view.find(run)
    except view.NoRunError as error:
        return fail(str(error), title="No run")
    try:
        view.once(url) if chosen.once else view.watch(url, chosen.interval)
    except view.UnreachableError as error:
        print(f"primerl top: {error}", file=sys.stderr)
        if ending := view.ending(run):
            print(f"the run {ending}", file=sys.stderr)
        return FAILED
    return 0


def page(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl page",
        description="Serves the page of a run from its files, on this machine: of a finished run, or of an active one "
        "(whose orchestrator serves the page too). Nothing is written. Ctrl-C ends it.",
    )
    parser.add_argument("run", help="output folder of a run, or its id")
    parser.add_argument("--port", type=port, default=0, help="port to serve it at (any free one)")
    chosen = parser.parse_args(arguments)
    from primerl.runs import served
    from primerl.runs.registry import UnknownRunError, folder_of
    from primerl.runs.state import StateError

    try:
        folder = folder_of(meant(chosen.run))
    except (UnknownRunError, StateError) as error:
        return fail(str(error), title="No page")
    if (address := served.noted_url(folder)) is not None:
        why = f"{folder} is of a server of the Tinker API, which serves its page itself while it runs: {address}/"
        return fail(why, title="No page")
    from primerl._core import PageServer, PrimerlError

    with awaited() as stop_is_asked:
        try:
            server = PageServer(folder, model_of(folder), port=chosen.port)
        except PrimerlError as error:
            return fail(str(error), title="No page")
        except OSError as error:
            return fail(f"--port {chosen.port}: cannot serve there: {error}", title="No page")
        print(f"the run's page: {server.url}/ (Ctrl-C ends it)", flush=True)
        stop_is_asked()
        server.stop()
        return 0


def model_of(output_dir: Path) -> str | None:
    """The folder of the run's model, by its resolved config; None where that does not say."""
    try:
        settings = tomllib.loads((output_dir / "configs" / "orchestrator.toml").read_text(encoding="utf-8"))
        return str(settings["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r}: {NOT_A_PORT}")
    return int(text)
