"""Kill -9 at random moments: the run goes on, and what it trains has no gap and no repeat."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from end_to_end import SMALL, Started, arguments_of, launch, read_lines, until, write_small
from primerl.cli import main

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]
VICTIMS = ["orchestrator", "trainer", "inference", "env_reverse-text_0"]
CHECKPOINTS = ("--ckpt.interval", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what is learnt does not matter here."""
    return write_small(tmp_path_factory.mktemp("models") / "tiny")


def journal_bytes(output: Path) -> int:
    return sum(file.stat().st_size for file in (output / "journal").glob("*.log"))


def alive(run: Started, name: str, but_not: int | None) -> Any:
    assert run.launcher.poll() is None, run.ended(5)
    pid = run.pid_of(name)
    return pid if pid != but_not else None


def grow(run: Started, size: int) -> None:
    """Until the journal has so many bytes more: a moment of the run, not of the clock."""
    enough = journal_bytes(run.output) + size

    def has_grown() -> bool:
        assert run.launcher.poll() is None, run.ended(5)
        return journal_bytes(run.output) >= enough

    until(has_grown, 120, f"the journal to grow by {size} bytes")


def check(output: Path, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step was cut once and trained once; the journal's core keeps its invariants."""
    for file in ("steps.jsonl", "metrics.jsonl"):
        assert [line["step"] for line in read_lines(output / file)] == list(range(1, steps + 1)), file
    assert main(["trace", str(output), "--check"]) == 0
    assert f"{steps} steps" in capsys.readouterr().out


# Every kill costs the imports of a process; forty of them are a soak.
@pytest.mark.parametrize("kills_of_each", [2, pytest.param(10, marks=pytest.mark.long)])
def test_a_run_survives_kills(
    kills_of_each: int, model: Path, tmp_path: Path, runs: list[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(5)
    arguments = (*SMALL, *CHECKPOINTS, "--restarts", "100")
    run = launch(model, tmp_path / "run", *arguments, "--max-steps", "100000")
    runs.append(run)
    run.note_mark()
    until(lambda: run.steps() >= 1 or run.launcher.poll() is not None, 120, "a step")
    victims = VICTIMS * kills_of_each
    generator.shuffle(victims)
    for name in victims:
        grow(run, generator.randrange(20_000))
        pid = until(lambda name=name: alive(run, name, None), 60, name)
        os.kill(pid, signal.SIGKILL)
        until(lambda name=name, pid=pid: alive(run, name, pid), 60, f"{name} to be started again")
    trained = run.steps()
    until(lambda: run.steps() > trained + 2 or run.launcher.poll() is not None, 120, "training to go on")
    run.launcher.send_signal(signal.SIGINT)
    code, output = run.ended(60)
    assert code == 130, output
    assert output.count("it is started again") == len(victims)
    # The same command, with an end in sight: what was stopped goes on.
    steps = len(read_lines(run.output / "steps.jsonl")) + 2
    last = launch(model, run.output, *arguments, "--max-steps", str(steps))
    runs.append(last)
    code, output = last.ended(300)
    assert code == 0, output
    assert "resuming the run" in output
    check(run.output, steps, capsys)


def test_the_same_command_goes_on_after_everything_was_killed(
    model: Path, tmp_path: Path, runs: list[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    for seen in (2, 5):
        run = launch(model, tmp_path / "run", *SMALL, *CHECKPOINTS, "--max-steps", "8")
        runs.append(run)
        run.note_mark()
        until(lambda run=run, seen=seen: run.steps() >= seen, 120, f"{seen} steps")
        run.kill()
        assert run.left() == []
    last = launch(model, tmp_path / "run", *SMALL, *CHECKPOINTS, "--max-steps", "8")
    runs.append(last)
    code, output = last.ended(120)
    assert code == 0, output
    check(tmp_path / "run", 8, capsys)
    assert "sent nothing for" not in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    again = launch(model, tmp_path / "run", *SMALL, *CHECKPOINTS, "--max-steps", "8")
    runs.append(again)
    code, output = again.ended(60)
    assert (code, "all 8 steps are trained" in output) == (0, True), output


def test_a_changed_config_is_refused_by_its_name(
    model: Path, tmp_path: Path, runs: list[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    run = launch(model, tmp_path / "run", *SMALL, "--max-steps", "1")
    runs.append(run)
    assert run.ended(120)[0] == 0
    shutil.copytree(run.output, tmp_path / "before")
    for dry_run in ([], ["--dry-run"]):
        changed = arguments_of(model, run.output, *SMALL, "--max-steps", "2", "--seed", "9", *dry_run)
        assert main(["rl", *changed]) == 2
        assert "seed = 0, and now seed = 9" in capsys.readouterr().err
    assert read_lines(run.output / "steps.jsonl") == read_lines(tmp_path / "before" / "steps.jsonl")
