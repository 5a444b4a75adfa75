"""Runs on a cluster that trains while something is done to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from end_to_end import Started, primerl, start, steps_of, until


@dataclass(frozen=True)
class LongRuns:
    total: int
    """Steps that are many."""
    wait_s: float
    """Until a part of a run has moved, on a machine that is busy."""
    limit_s: float
    """Until all of it has ended."""

    @contextlib.contextmanager
    def running(self, output: Path, *more: str, steps: int = 3, total: int | None = None) -> Iterator[Started]:
        """A run of `rl.toml` that has trained some steps, and has many to go."""
        size = ["--max-steps", str(total or self.total), "--ckpt.interval", "5", "--ckpt.keep-last", "3"]
        run = start(output, "@", "rl.toml", "--output-dir", str(output), *size, *more)
        try:
            until(lambda: run.steps() >= steps or run.launcher.poll() is not None, self.wait_s, "its first steps")
            yield run
        finally:
            run.kill()

    def last_undisturbed(self, output: Path, steps: int) -> None:
        """A run of some minutes, in which nothing is done to it, loses nothing."""
        with self.running(output, total=steps) as run:
            printed = self.has_finished(run, steps)
        assert "started again" not in printed, printed
        assert "lost" not in printed, printed

    def has_finished(self, run: Started, steps: int | None = None) -> str:
        """What it printed, of a run whose steps have no gap and no repeat."""
        code, printed = run.ended(self.limit_s)
        assert code == 0, printed
        assert steps_of(run.output) == list(range(1, (steps or self.total) + 1))
        assert "every invariant holds" in primerl("trace", str(run.output), "--check")
        return printed
