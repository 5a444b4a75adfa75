"""What takes long to find and seldom changes, kept in the user's cache folder. Standard library only.

Nothing depends on these files: what one holds is found again where it is absent, damaged or of another fingerprint, and
where the folder cannot be written.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORPHANED_S = 30 * 86_400.0


def kept(name: str, fingerprint: str, find: Callable[[], Any]) -> Any:
    """What `find` answers, a value of JSON, or what it answered an earlier process of this interpreter that gave the
    same fingerprint. There is one file for each name and interpreter. None is not kept."""
    file = _file(name)
    if file is None:
        return find()
    with contextlib.suppress(OSError, ValueError):
        if file.is_file():
            head, _, text = file.read_text(encoding="utf-8").partition("\n")
            if head == _head(fingerprint, text):
                return json.loads(text)
    found = find()
    if found is None:
        return None
    with contextlib.suppress(OSError, TypeError, ValueError):
        _write(file, fingerprint, json.dumps(found))
    return found


def _file(name: str) -> Path | None:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    place = hashlib.sha256(os.fsencode(sys.prefix)).hexdigest()[:16]
    # A user without a home has none.
    return folder / "primerl" / f"{name}-{place}.json" if folder.is_absolute() else None


def _head(fingerprint: str, text: str) -> str:
    """The first line: a digest, and whose file it is."""
    digest = hashlib.sha256(f"{fingerprint}\n{text}".encode()).hexdigest()
    return f"{digest} {sys.prefix!a}"


def _remove_orphans(folder: Path) -> None:
    """Virtualenvs come and go. The folder may be shared with machines that have others, so new files stay."""
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, SyntaxError), file.open(encoding="utf-8") as content:
            _, _, prefix = content.readline().partition(" ")
            if time.time() - file.stat().st_mtime > ORPHANED_S and not os.path.isdir(ast.literal_eval(prefix)):
                file.unlink()


def _write(file: Path, fingerprint: str, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(file.parent)
    number, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(number, "w", encoding="utf-8") as output:
            output.write(f"{_head(fingerprint, text)}\n{text}")
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
