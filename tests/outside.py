"""Parts of another package, as one that is installed beside primerl: a module and its entry points in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def install(folder: Path, module: str, source: str, entry_points: dict[str, str]) -> Path:
    """`entry_points`: by group, lines as in `entry_points.txt`. To be found by `PYTHONPATH` or `sys.path`."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    groups = (f"[{group}]\n{lines}\n" for group, lines in entry_points.items())
    (info / "entry_points.txt").write_text("".join(groups))
    return folder


def variables(folder: Path) -> dict[str, str]:
    """Of a process that has it installed."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.fspath(folder), before]))}


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """In this process."""
    monkeypatch.syspath_prepend(os.fspath(folder))
