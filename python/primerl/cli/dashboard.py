"""`primerl dashboard`: all runs on one page."""

from __future__ import annotations

import os
import secrets

from primerl.cli.arguments import CommandParser
from primerl.cli.looking import port
from primerl.config.errors.fail import fail
from primerl.process.signals import awaited

KEY = "PRIMERL_API_KEY"


def dashboard(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl dashboard",
        description="Serves a page with all runs of this user: their curves over each other, what differs in their "
        "configs, evaluations side by side, rollouts of the same example, checkpoints and costs. Nothing is written. "
        "Ctrl-C ends it.",
    )
    parser.add_argument("--port", type=port, default=0, help="port to serve it at (any free one)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve it at (127.0.0.1: this machine alone). At any other one a key is asked for: "
        f"{KEY}, or one that is made and printed",
    )
    chosen = parser.parse_args(arguments)
    from primerl.net.addresses import is_loopback
    from primerl.runs.dashboard.server import Dashboard
    from primerl.runs.registry import Registry
    from primerl.runs.state import StateError

    key = None if is_loopback(chosen.host) else os.environ.get(KEY) or secrets.token_urlsafe(24)
    try:
        with Registry(reading=True):
            pass  # a list that cannot be read is reported before anything starts
    except StateError as error:
        return fail(str(error), title="No dashboard")
    with awaited() as stop_is_asked:
        try:
            server = Dashboard(chosen.host, chosen.port, key)
        except OSError as error:
            return fail(
                f"--host {chosen.host} --port {chosen.port}: cannot serve there: {error}; give an address of this "
                "machine and a free port",
                title="No dashboard",
            )
        # A key that the user has set is not put on the screen.
        given = f"#key={key}" if key is not None and KEY not in os.environ else ""
        print(f"all runs: {server.url}/{given} (Ctrl-C ends it)", flush=True)
        stop_is_asked()
        server.stop()
        return 0
