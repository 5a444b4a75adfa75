"""A run whose trainer has two ranks, one of which is killed while the other is in the forward pass: all are started
again, and every step is trained once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from end_to_end import SMALL, Started, launch, primerl, read_lines, steps_of, until, write_small
from journal_records import events_of

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]
STEPS = 30
"""More than it comes to before the second rank is killed, on a busy machine too."""
LOOKS = 40
"""How often it is looked whether a step begins: a step takes less than a second."""


def rank_of(run: Started, rank: int, but_not: int | None = None) -> int | None:
    """The process of a rank. One that has just begun carries the mark before it has its variables."""
    assert run.launcher.poll() is None, run.ended(5)
    for pid in run.left():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and pid != but_not:
            return pid
    return None


def requested(output: Path) -> int:
    """The latest step whose batch a rank has asked for."""
    segments = sorted((output / "journal").glob("*.log"))
    steps = [
        record.fields["step"]
        for segment in segments
        for record in events_of(segment)
        if record.kind == "batch_requested"
    ]
    return max(steps, default=0)


def stops_a_step(run: Started, victim: int) -> bool:
    """Whether another step begins without this rank, which is held then. Held elsewhere, at the end of a step, it keeps
    the first rank from asking for the next batch, and is let go."""
    os.kill(victim, signal.SIGSTOP)
    looks = iter(range(LOOKS))
    until(lambda: requested(run.output) > run.steps() or next(looks, None) is None, 60, "a step to begin")
    if requested(run.output) > run.steps():
        return True
    os.kill(victim, signal.SIGCONT)
    return False


def test_a_rank_killed_while_the_others_are_in_forward(tmp_path: Path, runs: list[Started]) -> None:
    model = write_small(tmp_path / "tiny")
    arguments = (*SMALL, "--trainer.ranks", "2", "--ckpt.interval", "2")
    run = launch(model, tmp_path / "run", *arguments, "--max-steps", str(STEPS))
    runs.append(run)
    run.note_mark()
    for rank, seen in ((1, 2), (0, 5)):
        until(lambda seen=seen: run.steps() >= seen or run.launcher.poll() is not None, 120, f"{seen} steps")
        victim = until(lambda rank=rank: rank_of(run, rank), 60, f"rank {rank}")
        if rank > 0:
            # It takes no part in the next step, which the first rank asks for, begins and cannot end.
            until(lambda victim=victim: stops_a_step(run, victim), 120, "a step that the rank stops")
        else:
            until(lambda: requested(run.output) > run.steps(), 60, "a step to begin")
        os.kill(victim, signal.SIGKILL)
        until(lambda rank=rank, victim=victim: rank_of(run, rank, victim), 120, "the ranks to be started again")
    code, output = run.ended(300)
    assert code == 0, output
    for rank in (0, 1):
        assert f"rank {rank} was killed by SIGKILL; the other ranks were ended" in (
            run.output / "logs" / "trainer.log"
        ).read_text(encoding="utf-8")
    assert output.count("trainer was killed by SIGKILL") == 2, output
    assert steps_of(run.output) == list(range(1, STEPS + 1))
    assert [line["step"] for line in read_lines(run.output / "steps.jsonl")] == list(range(1, STEPS + 1))
    assert f"{STEPS} steps" in primerl("trace", str(run.output), "--check")
