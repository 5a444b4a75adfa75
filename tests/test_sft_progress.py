"""Progress: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import threading

import pytest
from primerl.train import progress


def test_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = iter([0.0, 1.0, 6.0, 6.0, 7.0, 12.0, 12.0])
    monkeypatch.setattr("primerl.train.progress.time.monotonic", lambda: next(moment))
    caplog.set_level(logging.INFO, "primerl.train.progress")
    with progress.progress("tokenising chats") as report:
        for share in (0.1, 0.5, 0.6, 1.0):
            report(share, f"{100 * share:.0f} rows")
    assert [record.getMessage() for record in caplog.records] == [
        "tokenising chats: 50 %, 50 rows",
        "tokenising chats: 100 %, 100 rows",
    ]


BAR = """
from primerl.train.progress import progress
with progress("tokenising chats") as report:
    report(0.5, "1,234 rows")
"""


def seen_on_a_terminal(**variables: str) -> bytes:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **variables}
    process = subprocess.Popen([sys.executable, "-c", BAR], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # the terminal's other side is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0, seen
    return seen


def test_a_bar_on_a_terminal() -> None:
    seen = seen_on_a_terminal()
    assert b"tokenising chats" in seen
    assert b"1,234 rows" in seen
    assert b"50%" in seen


def test_of_several_ranks_one_draws() -> None:
    assert seen_on_a_terminal(RANK="1") == b""


def test_what_has_no_share_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.01)
    said, heard = [], threading.Event()

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        heard.set()
        return True

    monkeypatch.setattr(progress.log, "filters", [hear])
    monkeypatch.setattr(progress.log, "level", logging.INFO)
    with progress.taking("loading the model"):
        assert heard.wait(60)
    assert said[0] == "loading the model: for 0 s"
    assert not any(thread.name == "progress" for thread in threading.enumerate())
