"""An event that cannot be played back: every start names it, and one that leaves it out continues the run."""

from __future__ import annotations

import os
import signal
import struct
import sys
import zlib
from pathlib import Path

import msgpack
import pytest
from end_to_end import SMALL, Started, launch, primerl, read_lines, until, write_small
from journal_records import HEADER, Record, events_of

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]


def playable(journal: Path, kind: str) -> list[Record]:
    """The events of this kind that a start would play back, since the newest snapshot."""
    newest = max((int(file.stem) for file in journal.glob("*.snapshot")), default=0)
    segment = max(journal.glob("*.log"))
    return [event for event in events_of(segment) if event.number > newest and event.kind == kind]


def kill_behind(run: Started, kind: str) -> None:
    """Kills the run at a moment at which there is such an event: none follows a snapshot at once."""
    pid = until(lambda: run.pid_of("orchestrator"), 20, "the orchestrator")

    def is_held() -> bool:
        os.kill(pid, signal.SIGSTOP)
        if playable(run.output / "journal", kind):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    until(is_held, 60, f"an event {kind}")
    run.kill()


def poison(journal: Path, kind: str) -> int:
    """Makes the last event of this kind since the newest snapshot one of another version, as far as this one knows;
    returns its number."""
    segment = max(journal.glob("*.log"))
    last = playable(journal, kind)[-1]
    time, _ = msgpack.unpackb(last.body, strict_map_key=False)
    other = msgpack.packb([time, {"of_another_version": {}}])
    length = struct.pack("<I", len(other))
    header = HEADER.pack(len(other), zlib.crc32(length), zlib.crc32(other))
    bytes_ = segment.read_bytes()
    segment.write_bytes(bytes_[: last.at] + header + other + bytes_[last.at + HEADER.size + len(last.body) :])
    return last.number


def test_an_event_that_is_refused_is_offered_to_be_left_out_and_the_run_goes_on(
    tmp_path: Path, runs: list[Started]
) -> None:
    model = write_small(tmp_path / "tiny")

    def started(steps: int, *more: str) -> Started:
        run = launch(model, tmp_path / "run", *SMALL, "--ckpt.interval", "2", "--max-steps", str(steps), *more)
        runs.append(run)
        return run

    run = started(100_000)
    run.note_mark()
    until(lambda: run.steps() >= 2 or run.launcher.poll() is not None, 120, "two steps")
    kill_behind(run, "sampling_started")
    journal = run.output / "journal"
    number = poison(journal, "sampling_started")
    steps = len(read_lines(run.output / "steps.jsonl")) + 2
    offer = f"event {number} (`unknown`), cannot be played back: "
    refused = {path.name: path.read_bytes() for path in journal.iterdir()}
    # It fails alike at every start, and changes nothing.
    for _ in range(2):
        code, output = started(steps).ended(120)
        assert code == 2, output
        assert offer in output
        assert f"skip this event with --skip-event {number}" in output
        assert {path.name: path.read_bytes() for path in journal.iterdir()} == refused
    code, output = started(steps, "--skip-event", str(number + 10_000)).ended(120)
    assert code == 2, output
    assert f"holds no event {number + 10_000}" in output

    code, output = started(steps, "--skip-event", str(number)).ended(240)
    assert code == 0, output
    (kept,) = journal.glob(f"*.before_skip_{number}")
    assert kept.read_bytes() == refused[kept.name.removesuffix(f".before_skip_{number}")]
    assert f"{steps} steps" in primerl("trace", str(run.output), "--check")
    for file in ("steps.jsonl", "metrics.jsonl"):
        assert [line["step"] for line in read_lines(run.output / file)] == list(range(1, steps + 1)), file
    # Without the flag it continues as well.
    code, output = started(steps + 1).ended(120)
    assert code == 0, output
