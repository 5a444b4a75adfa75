"""Whether a command line asks for help. Standard library only: it is asked before anything is imported."""

from __future__ import annotations

from collections.abc import Sequence

ASKED = ("-h", "--help", "--help-all")


def for_help(arguments: Sequence[str]) -> bool:
    return any(argument in ASKED or argument.startswith("--help=") for argument in arguments)
