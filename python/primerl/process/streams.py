"""Standard streams that were closed when this program began (`primerl .. >&-`, daemons). Standard library only."""

from __future__ import annotations

import os
import sys

NAMES = ("stdin", "stdout", "stderr")


def ensure() -> None:
    """Opens the null device in place of each. What is printed is lost, as asked for, and no file or socket that is
    opened later gets the number of a stream, which children write to."""
    closed = [number for number, name in enumerate(NAMES) if getattr(sys, name) is None]
    for number in closed:
        try:
            os.fstat(number)
        except OSError:
            _open_null(number)
    for number in closed:
        setattr(sys, NAMES[number], open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


def _open_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(null, number)
        os.close(null)
