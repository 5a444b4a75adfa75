"""`primerl run get`: all that is known of one run."""

from __future__ import annotations

import argparse
import json

from primerl.cli.run.common import add_json, parser_of, with_run
from primerl.cli.run.listing import described
from primerl.runs.registry import Run
from primerl.runs.standing import standing


def main(arguments: list[str]) -> int:
    parser = parser_of("get", "Prints all that is known of a run, as one JSON object.")
    # Also as `prime train get` has it; a table of one run would be a line of `list`.
    add_json(parser, "print JSON, as it does anyway")
    return with_run(parser, arguments, _get)


def _get(run: Run, _: argparse.Namespace) -> int:
    print(json.dumps(described(run, standing(run)), indent=2))
    return 0
