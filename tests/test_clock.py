"""The clock of the machine jumps, by hours and back: a run goes by a clock that does not."""

from __future__ import annotations

import os
import sys
from importlib.metadata import files
from itertools import pairwise
from pathlib import Path

import pytest
from end_to_end import launch, read_lines, until
from primerl.cli import main
from primerl.models.tiny import TinyConfig, write_model

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="preloads a library"),
]
HOUR = 3600
STEPS = 12


def fake_clock(offset: Path) -> dict[str, str]:
    """An environment whose processes see the real clock, moved by what the file says when they look."""
    (library,) = [file for file in files("libfaketime") or () if file.name == "libfaketime.so.1"]
    return {
        "LD_PRELOAD": str(library.locate()),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        # Nobody can set that one, so it does not jump.
        "DONT_FAKE_MONOTONIC": "1",
    }


def test_a_run_does_not_care_about_a_clock_that_jumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "tiny"
    write_model(model, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    offset = tmp_path / "offset"
    offset.write_text("+0\n")
    small = ("--orchestrator.eval.env", "[]", "--orchestrator.batch-size", "16", "--max-steps", str(STEPS))
    run = launch(model, tmp_path / "run", *small, variables=fake_clock(offset))
    try:
        run.note_mark()
        for steps, hours in ((1, 30), (4, -50), (8, 1)):
            until(lambda steps=steps: run.steps() >= steps or run.launcher.poll() is not None, 120, f"{steps} steps")
            moved = tmp_path / "moved"
            moved.write_text(f"{hours * HOUR:+d}\n")
            os.replace(moved, offset)
        code, output = run.ended(120)
    finally:
        run.kill()
    assert code == 0, output
    assert not [word for word in ("lost", "started again") if word in output], output
    metrics = read_lines(run.output / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    # They did see it.
    times = [line["timestamp"] for line in metrics]
    jumps = [after - before for before, after in pairwise(times)]
    assert max(jumps) > 29 * HOUR, jumps
    assert min(jumps) < -79 * HOUR, jumps
    assert main(["trace", str(run.output), "--check"]) == 0
    assert f"{STEPS} steps" in capsys.readouterr().out
