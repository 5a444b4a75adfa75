"""Modules of the working folder that Python imports in place of libraries. Standard library only.

`python -m` looks into the working folder first, so all processes of a run import a user's own `random.py` from there.
Where it ends the process, or lacks what the library has, the process's last line is about neither.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterable
from pathlib import Path

MOST_NAMED = 5


def shadowing(folder: Path, search: Iterable[str] | None = None) -> list[Path]:
    """Files in the folder that have the name of a module of the standard library, or of an installed package.

    Args:
        search: Where packages are installed; default: `sys.path` without the folder.
    """
    given = sys.path if search is None else search
    elsewhere = [path for path in given if os.path.realpath(path or os.curdir) != os.path.realpath(folder)]
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        # A folder without it is a namespace, which any package of that name goes before.
        file = entry if entry.suffix == ".py" else entry / "__init__.py"
        name = entry.stem if entry.suffix == ".py" else entry.name
        if not name.isidentifier() or not file.is_file():
            continue
        installed = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        # A checkout that is installed in place is the package itself.
        is_other = installed is not None and installed.origin is not None and not _same(file, installed.origin)
        if is_other or (installed is None and name in sys.stdlib_module_names):
            found.append(file)
    return found


def hint() -> str:
    """What to add where a process that was to import libraries has failed; empty where nothing shadows one."""
    if sys.flags.safe_path or os.environ.get("PYTHONSAFEPATH"):
        return ""
    files = shadowing(Path.cwd())
    if not files:
        return ""
    named = ", ".join(map(str, files[:MOST_NAMED])) + (", ..." if len(files) > MOST_NAMED else "")
    what = "is" if len(files) == 1 else "are"
    return f"; {named} {what} imported in place of the library of that name: rename it, or start in another folder"


def _same(file: Path, origin: str) -> bool:
    return os.path.realpath(file) == os.path.realpath(origin)
