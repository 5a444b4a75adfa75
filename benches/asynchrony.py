"""Is it asynchronous? The same work with `max_async_level` 0 and 1, in turn, several times.

    python benches/asynchrony.py                          # fine-tunes a model first, about 5 minutes on 2 cores
    python benches/asynchrony.py --model outputs/reverse-text/sft/weights/step_600

Prints, for each run, the trainer's seconds for all steps, and how much of it trainer and engine waited;
then the ratio of the medians. Trainer and engine have one core each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from demo_seeds import fine_tune, reinforce
from primerl.runs.report import Results


def idle_shares(results: Results) -> tuple[float, float]:
    """Of the trainer (waiting for batches) and of the engine."""
    waited, step = sum(results.column("time/wait_for_batch")), sum(results.column("time/step"))
    (engine,) = results.summary["status"]["engines"]
    return waited / step, float(engine["idle_share"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench-asynchrony"))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model or fine_tune(arguments.output, seed=0)[0]
    seconds: dict[int, list[float]] = {0: [], 1: []}
    print("level   training s   trainer idle   engine idle")
    for _ in range(arguments.repeats):
        for level, measured in seconds.items():
            results, _ = reinforce(
                *(model, arguments.output / str(level), 0),
                *("--orchestrator.max-async-level", str(level), "--orchestrator.eval.env", "[]"),
            )
            # The trainer's own clock: process starts are the same in both.
            training_s = sum(results.column("time/step"))
            measured.append(training_s)
            trainer, engine = idle_shares(results)
            print(f"{level}       {training_s:10.1f}   {trainer:12.0%}   {engine:11.0%}", flush=True)
    slow, fast = (statistics.median(seconds[level]) for level in (0, 1))
    print(f"level 1 takes {fast / slow:.2f} of the time of level 0 ({fast:.1f} s against {slow:.1f} s, medians)")
    return 0 if fast < slow else 1


if __name__ == "__main__":
    sys.exit(main())
