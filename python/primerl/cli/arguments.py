"""Shared by subcommands: their argument parser, and the check of the state folder. Standard library only."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from primerl.cli.command_end import CommandEnd


class CommandParser(argparse.ArgumentParser):
    """Raises CommandEnd, which `primerl.cli.main` turns into an exit code, where argparse would exit."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        raise CommandEnd(status)


def keep_state(output_dir: str) -> None:
    """Moves the state folder into the run's folder if its usual place is unusable; call it before using the state."""
    from primerl.runs import state

    notice = state.within_run(output_dir)
    if notice is not None:
        print(notice, file=sys.stderr, flush=True)


def count(text: str) -> int:
    """Type of an argument that says how many."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)
