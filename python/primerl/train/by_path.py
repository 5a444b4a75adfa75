"""What a config names as `module:name`. Standard library only."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


class ImportFailedError(Exception):
    """The module cannot be imported; the message is what importing it raised."""


def find_by_path(path: str) -> Any:
    """What the module has under that name; None where it has nothing. Raises ImportFailedError."""
    module, _, name = path.partition(":")
    # A command that was installed does not look into the folder it is started in, as `python -m` does.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return getattr(import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ImportFailedError(f"{type(error).__name__}: {error}") from error
