"""What subcommands with arguments of their own share. Standard library only."""

from __future__ import annotations

import argparse
import sys


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace | int:
    """What was chosen, or the exit code after help or a complaint."""
    try:
        return parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def parse_known(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]] | int:
    """What was chosen and what is left for others to read, or the exit code after help or a complaint."""
    try:
        return parser.parse_known_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def keep_state(output_dir: str) -> None:
    """Before the state folder is asked for anything."""
    from primerl.runs import state

    remark = state.within_run(output_dir)
    if remark is not None:
        print(remark, file=sys.stderr, flush=True)
