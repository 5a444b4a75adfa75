"""How long the trainer waits for a batch that is ready, with the orchestrator itself.

    python benches/batch_wait.py [--steps 25]          # about a minute

A short run of a tiny model with random weights leaves its batches in the spool. Then its orchestrator starts again,
and a trainer without a checkpoint trains the same batches: each of them is ready when it is asked for, which a thread
does while the step before is trained. The wait is `time/wait_for_batch` of that trainer: what is left of request,
answer and tensors made of it when that step has ended. Goal: 2 ms, of the median step, the first ones left out. Exits 1
when it is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RECIPE = Path(__file__).resolve().parent.parent / "examples" / "reverse-text" / "rl-ci.toml"
WARM_UP = 3
GOAL_S = 0.002
STARTS_WITHIN_S = 30.0


def primerl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "primerl", *arguments]


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def leave_batches(folder: Path, output: Path, steps: int) -> None:
    from primerl.models.tiny import write_model

    write_model(folder / "model", seed=0)
    given = ["--model.path", str(folder / "model"), "--output-dir", str(output), "--max-steps", str(steps)]
    # A trainer that has no checkpoint has to begin again.
    subprocess.run(
        primerl("rl", "@", str(RECIPE), *given, "--orchestrator.eval.env", "[]"), check=True, stdout=sys.stderr
    )


def train_again(output: Path, steps: int) -> None:
    said = output / "run" / "orchestrator.json"
    said.unlink()
    configs = output / "configs"
    # More steps than there are, so that the run is not over.
    more = primerl("orchestrator", "@", str(configs / "orchestrator.toml"), "--max-steps", str(steps + 1000))
    with (output / "logs" / "again.log").open("w", encoding="utf-8") as log:
        orchestrator = subprocess.Popen(more, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + STARTS_WITHIN_S
            while not said.exists():
                if orchestrator.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the orchestrator does not start: {log.name}")
                time.sleep(0.05)
            url = json.loads(said.read_text(encoding="utf-8"))["url"]
            again = primerl("trainer", "@", str(configs / "trainer.toml"), "--orchestrator-url", url)
            subprocess.run(again, check=True, stdout=log, stderr=subprocess.STDOUT)
        finally:
            orchestrator.terminate()
            orchestrator.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="primerl-bench-") as folder:
        output = Path(folder) / "run"
        leave_batches(Path(folder), output, steps)
        train_again(output, steps)
        waits = sorted(line["time/wait_for_batch"] for line in lines(output)[WARM_UP:])
        size = median(path.stat().st_size for path in (output / "spool").glob("*/*.msgpack"))
    least, middle, most = (1e3 * value for value in (waits[0], median(waits), waits[-1]))
    load = os.getloadavg()[0]
    print(
        f"the trainer waits {middle:.2f} ms for a batch of {size / 1e3:.0f} kB that is ready ({least:.2f} at least, "
        f"{most:.2f} at most, {len(waits)} steps; load of the machine {load:.1f} on {os.cpu_count()} cores)"
    )
    return 0 if median(waits) <= GOAL_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
