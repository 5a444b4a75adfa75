"""Progress: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tomli_w
from primerl.train.loop import progress
from sft_helpers import settings, write_rows


def test_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = iter([0.0, 1.0, 6.0, 6.0, 7.0, 12.0, 12.0])
    monkeypatch.setattr("primerl.train.loop.progress.time.monotonic", lambda: next(moment))
    caplog.set_level(logging.INFO, "primerl.train.loop.progress")
    with progress.progress("tokenising chats") as report:
        for share in (0.1, 0.5, 0.6, 1.0):
            report(share, f"{100 * share:.0f} rows")
    assert [record.getMessage() for record in caplog.records] == [
        "tokenising chats: 50 %, 50 rows",
        "tokenising chats: 100 %, 100 rows",
    ]


BAR = """
from primerl.train.loop.progress import progress
with progress("tokenising chats") as report:
    report(0.5, "1,234 rows")
"""


def seen_on_a_terminal(*command: str, **variables: str) -> bytes:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", **variables}
    process = subprocess.Popen([sys.executable, *command], stdout=theirs, stderr=theirs, env=environment)
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


@pytest.mark.processes
def test_a_bar_on_a_terminal() -> None:
    seen = seen_on_a_terminal("-c", BAR)
    assert b"tokenising chats" in seen
    assert b"1,234 rows" in seen
    assert b"50%" in seen


@pytest.mark.processes
def test_of_several_ranks_one_draws() -> None:
    assert seen_on_a_terminal("-c", BAR, RANK="1") == b""


WITHIN = """
import logging, sys
from primerl.train.loop.metrics import log_to_stdout
from primerl.train.loop.progress import bar, progress
log_to_stdout("info")
with bar("training") as report:
    report(0.25, "step 1/4")
    with progress("validating") as inner:
        inner(0.5, "7 tokens")
        logging.getLogger("primerl.train").info("a line among them")
    logging.getLogger("primerl.train").info("another")
logging.getLogger("primerl.train").info("the last")
"""


@pytest.mark.processes
def test_bars_within_bars_leave_lines_whole() -> None:
    seen = seen_on_a_terminal("-c", WITHIN)
    for words in (b"training", b"step 1/4", b"validating", b"7 tokens"):
        assert words in seen
    for words in (b"a line among them", b"another", b"the last"):
        assert re.search(rb"\d\d:\d\d:\d\d INFO " + words + b"\r\n", seen), seen


@pytest.mark.processes
def test_fine_tuning_on_a_terminal_shows_its_steps(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": "b" * n} for n in range(1, 10)))
    val = {"interval": 3, "data": {"path": str(tmp_path / "rows.jsonl")}}
    (tmp_path / "sft.toml").write_text(tomli_w.dumps(settings(tmp_path, max_steps=6, val=val)))
    seen = seen_on_a_terminal("-m", "primerl", "sft", "@", str(tmp_path / "sft.toml"))
    assert b"training" in seen
    assert re.search(rb"step 6/6  loss \d", seen), seen
    # Every line of the log is whole, above the bars; elsewhere lines tell the time that is left, too.
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen).decode()
    for step, left in ((3, r"  eta 0:0\d"), (6, "")):
        assert re.search(rf"INFO step {step}/6  loss \S+  val \S+ .* tokens/s \S+{left}\r\n", plain), plain
    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert re.search(r"INFO step 3/6  .*  eta 0:0\d$", log, re.MULTILINE)


def test_the_time_that_is_left() -> None:
    """From the steps that were seen, but for the first, which takes longer."""
    moment = [0.0]
    remaining = progress.Remaining(lambda: moment[0])

    def at(now: float, step: int, last: int = 10) -> float | None:
        moment[0] = now
        return remaining.seconds(step, last)

    assert at(0.0, 0) is None
    assert at(50.0, 1) is None  # a model was loaded before it
    assert at(60.0, 2) == pytest.approx(8 * 10.0)
    assert at(64.0, 3) == pytest.approx(7 * 7.0)
    assert at(66.0, 3) == pytest.approx(7 * 7.0 - 2.0)
    assert at(99.0, 3) == pytest.approx(6 * 7.0), "the step that takes longer is not over"
    assert at(106.0, 7) == pytest.approx(3 * 56 / 6)
    assert at(110.0, 10) is None
    # Another trainer has gone on from a checkpoint.
    assert at(200.0, 4) is None
    assert at(230.0, 5) == pytest.approx(5 * 30.0)
    assert at(232.0, 6) == pytest.approx(4 * 2.0)


def test_only_late_steps_count_for_the_time_that_is_left() -> None:
    moment = iter([*(float(10 * step) for step in range(1, 101)), *(1000.0 + step for step in range(1, 101))])
    remaining = progress.Remaining(lambda: next(moment))
    *_, left = (remaining.seconds(step, 300) for step in range(1, 201))
    assert left == pytest.approx(100.0)


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0:00"), (59.6, "1:00"), (187.0, "3:07"), (43387.0, "12:03:07")])
def test_durations(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words


def test_what_has_no_share_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.01)
    said, heard = [], threading.Event()

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        heard.set()
        return True

    monkeypatch.setattr(progress.log, "filters", [hear])
    monkeypatch.setattr(progress.log, "level", logging.INFO)
    with progress.taking("loading the model") as tell:
        assert heard.wait(60)
        tell(0.4)
        heard.clear()
        assert heard.wait(60)
        heard.clear()
        assert heard.wait(60)
    assert said[0] == "loading the model: for 0 s"
    assert said[-1] == "loading the model: 40 %, for 0 s"
    assert not any(thread.name == "progress" for thread in threading.enumerate())
