"""`primerl run restart`."""

from __future__ import annotations

import argparse

from primerl.cli.run import resume, stop
from primerl.cli.run.common import parser_of


def main(arguments: list[str]) -> int:
    parser = parser_of("restart", "Stops a run, waits for its end, and resumes it with the same config.")
    parser.add_argument("-d", "--detach", action="store_true", help="in the background")
    # A flag of `prime train restart`, which asks first.
    parser.add_argument("-f", "--force", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    return stop.main([chosen.id]) or resume.main([chosen.id, *(["--detach"] if chosen.detach else [])])
