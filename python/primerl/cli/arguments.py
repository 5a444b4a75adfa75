"""What subcommands with arguments of their own share. Standard library only."""

from __future__ import annotations

import argparse


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
