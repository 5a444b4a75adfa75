"""The configs of a run that is there already, of which a start that changes nothing leaves every one as it was.

They say what the run was made with: `primerl verify`, `run compare` and the page read them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from primerl.config.process_files import files
from primerl.launch import storing

FOLDER = "configs"
AFTER_THE_END = ("monitor.toml", f"{storing.NAME}.toml")
"""Configs of processes that work on a run that is over, too: they send what is left, by what the last start says."""


class KeptConfigs:
    """Those in the folder by the time that this is made, which its maker has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._before = {path: _content(path) for path in self._files()}

    def _files(self) -> list[Path]:
        return [path for path in sorted(self._folder.rglob("*.toml")) if path.is_file()]

    def put_back(self, *, but: Collection[str] = ()) -> None:
        """Undoes what was written since, except to files of these names. Where there were none, those of the start that
        ends stay, to be looked at. Raises OSError."""
        if not self._before:
            return
        for path, content in self._before.items():
            if content is not None and path.name not in but and _content(path) != content:
                files.write_bytes(path, content)
        for path in self._files():
            if path.name not in but and path not in self._before:
                path.unlink()


def _content(path: Path) -> bytes | None:
    """None for one that cannot be read, which is not written to either."""
    try:
        return path.read_bytes()
    except OSError:
        return None
