"""Shows, with a test that failed, the ends of the logs of what it ran."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

FILES = 8
LINES = 40
# Of a longer file only the end is read.
BYTES = 64 * 1024


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"the end of {file}", tail(file)) for file in newest(set(folders(item)))]
    return report


def folders(item: pytest.Item) -> Iterator[Path]:
    """Folders among the values of a test's fixtures, and those of a run or a server among them."""
    for value in getattr(item, "funcargs", {}).values():
        for candidate in (value, *(getattr(value, name, None) for name in ("output", "folder", "output_dir", "log"))):
            if isinstance(candidate, Path) and not is_repository(candidate):
                yield candidate if candidate.is_dir() else candidate.parent


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
