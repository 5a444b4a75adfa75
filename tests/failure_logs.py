"""Shows, with a test that failed, the ends of the logs of what it ran."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

FILES = 8
LINES = 40
# Of a longer file only the end is read.
BYTES = 64 * 1024
# Of a run or a server that a fixture starts.
ATTRIBUTES = ("output", "output_dir", "folder", "log")
FOLDERS = pytest.StashKey[set[Path]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"the end of {file}", tail(file)) for file in newest(folders(item))]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Generator[None, object, object]:
    """Keeps the folders that fixtures make, with the test, the module or the session that they are for."""
    value = yield
    found = request.node.stash.setdefault(FOLDERS, set())
    for candidate in (value, *(getattr(value, name, None) for name in ATTRIBUTES)):
        if isinstance(candidate, Path) and not is_repository(candidate):
            found.add(candidate if candidate.is_dir() else candidate.parent)
    return value


def folders(item: pytest.Item) -> set[Path]:
    return {folder for node in item.listchain() for folder in node.stash.get(FOLDERS, ())}


def is_repository(path: Path) -> bool:
    return Path(__file__).resolve().is_relative_to(path.resolve())


def newest(roots: set[Path]) -> list[Path]:
    found: dict[Path, float] = {}
    for root in roots:
        for file in root.rglob("*.log"):
            try:
                status = file.stat()
            except OSError:
                continue
            # An empty one says nothing; the journal's files are binary.
            if file.is_file() and status.st_size and file.parent.name != "journal":
                found[file.resolve()] = status.st_mtime
    return sorted(found, key=lambda file: -found[file])[:FILES]


def tail(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - BYTES))
            text = opened.read().decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error}"
    return "\n".join(text.splitlines()[-LINES:])
