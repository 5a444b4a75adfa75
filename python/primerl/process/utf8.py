"""Text is UTF-8, whatever the locale: files, arguments, what is printed. Standard library only."""

from __future__ import annotations

import os
import sys

from primerl import forking

VARIABLE = "PYTHONUTF8"


def ensure() -> None:
    """Restarts this program in Python's UTF-8 mode, where the locale has another encoding; so do its children.

    Files of ours name their encoding. Libraries and environments do not, and a path that was given in UTF-8 can be
    neither printed nor written by a process that took it for ASCII.
    """
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get(VARIABLE) == "1" or forking.is_fork:
        return
    os.environ[VARIABLE] = "1"
    os.execv(sys.executable, [os.fsencode(word) for word in (sys.executable, *sys.orig_argv[1:])])
