"""A rank that is killed or hangs is named, the others end, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from end_to_end import until
from primerl.launch.supervise.trees import MARK, marked
from primerl.train.distributed.torchrun import STOP_S
from rank_helpers import Case, start_ranks
from sft_helpers import settings, write_rows

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]


@pytest.fixture
def changes() -> dict[str, Any]:
    return {}


@pytest.fixture
def started(tmp_path: Path, changes: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """`primerl sft` with two ranks and more steps than it can come to."""
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": "x" * size} for size in range(1, 12)))
    values = {"max_steps": 1_000_000, "ranks": 2, **changes}
    (tmp_path / "sft.toml").write_text(tomli_w.dumps(settings(tmp_path, **values)))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "primerl", "sft", "@", str(tmp_path / "sft.toml")],
            env={**os.environ, MARK: str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    yield process
    for pid in marked(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def rank_once_it_trains(process: subprocess.Popen[bytes], folder: Path, rank: int) -> int:
    trains_in(process, folder)
    (pid,) = (pid for pid in marked(str(folder)) if f"RANK={rank}".encode() in environment(pid))
    return pid


def trains_in(process: subprocess.Popen[Any], folder: Path) -> None:
    metrics = folder / "run" / "metrics.jsonl"

    def trains() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= 3

    until(trains, 120, "three steps")


def environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_a_killed_rank_is_named_and_ends_all_as_it_did(started: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The process that started it is killed by the same signal, so that whoever starts such ones again does."""
    os.kill(rank_once_it_trains(started, tmp_path, 1), signal.SIGKILL)
    assert started.wait(60) == -signal.SIGKILL
    assert "rank 1 was killed by SIGKILL; the other ranks were ended" in (tmp_path / "log").read_text()
    until(lambda: not marked(str(tmp_path)), 30, "no process left")


def test_ranks_do_not_outlive_who_started_them(started: subprocess.Popen[bytes], tmp_path: Path) -> None:
    rank_once_it_trains(started, tmp_path, 0)
    started.kill()
    until(lambda: not marked(str(tmp_path)), 30, "no process left")


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": "x" * size} for size in range(1, 12)))
    # As long as ranks may differ in how long they import.
    case = Case("sft", 2, settings(tmp_path, max_steps=1_000_000, dist_timeout_s=15.0))
    first, second = start_ranks([case])
    try:
        trains_in(first, tmp_path)
        second.send_signal(signal.SIGSTOP)
        assert first.wait(60) == 1
        assert first.stdout is not None
        assert "rank 0: rank 1 is gone or hangs, for " in first.stdout.read()
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("changes", [{"dist_timeout_s": 15.0, "ckpt": {"interval": 1, "keep_last": 1}}])
def test_a_rank_that_hangs_while_checkpoints_are_saved_is_named_and_ended(
    started: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The thread that saves waits for the other ranks as well. The one that hangs does not hear that it is to end."""
    os.kill(rank_once_it_trains(started, tmp_path, 1), signal.SIGSTOP)
    until(lambda: "rank 1 is gone or hangs, for " in (tmp_path / "log").read_text(), 60, "the rank is named")
    assert started.wait(15 + STOP_S) == 1  # what it takes torch by itself is 30 s
    until(lambda: not marked(str(tmp_path)), 10, "no process left")
