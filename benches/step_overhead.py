"""What a step of the policy trainer spends beside forward, backward and optimizer.

    python benches/step_overhead.py                    # a tiny model and one of 15M parameters, some minutes
    python benches/step_overhead.py --models 15m --steps 20 --clock cpu

`primerl trainer` itself, with a broadcast after each step, against a process that has all batches ready. Shares are of
the median step, the first ones left out; the least is what is left where nothing else wants the processor. Seconds are
CPU seconds of the thread that trains where others use the machine (`--clock cpu`): then waiting takes none. Goal: at
most 3 % of a step. Exits 1 when it is missed. How long the trainer waits for an orchestrator's batches:
`benches/batch_wait.py`. The same of supervised fine-tuning: `benches/sft_throughput.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from sft_throughput import MODELS
from step_parts import report
from train_helpers import OrchestratorDouble, Sequence, encode_batch

PROMPT, SAMPLED, SAMPLES = 64, (64, 448), 8
"""Tokens of a prompt and of an answer, samples a step."""


def body(step: int) -> bytes:
    """Two micro-batches of a step."""
    generator = random.Random(step)

    def tokens(count: int) -> list[int]:
        return generator.choices(range(256), k=count)

    samples = []
    for index in range(SAMPLES):
        sampled = tokens(generator.randint(*SAMPLED))
        logprobs = [generator.uniform(-7, -4) for _ in sampled]
        samples.append(Sequence(tokens(PROMPT), sampled, logprobs, step - 1, advantage=1.0 - 2 * (index % 2)))
    return encode_batch(step, [samples[first::2] for first in range(2)])


def serve(steps: int, connection: Connection) -> None:
    """In a process of its own, as the orchestrator is. Batches are ready before the URL is known."""
    bodies = {step: body(step) for step in range(1, steps + 1)}

    def ready(step: int, _rank: int) -> tuple[int, bytes]:
        return 200, bodies[step]

    with OrchestratorDouble(ready, ahead=ready) as double:
        connection.send(double.url)
        connection.recv()


def trained(name: str, folder: Path, steps: int, now: Callable[[], float] = time.perf_counter) -> list[dict[str, Any]]:
    """Lines of metrics."""
    from primerl.config.process_files.files import resolved
    from primerl.config.schema import trainer as schema
    from primerl.models.tiny import write_model
    from primerl.process.setting_checks import from_mapping
    from primerl.train.loop import metrics, policy_trainer, rl
    from primerl.train.settings import TrainerConfig

    policy_trainer.Clock = partial(metrics.Clock, now)  # type: ignore[attr-defined]
    write_model(folder / "model", MODELS[name], seed=0)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(steps, theirs))
    server.start()
    values = {
        "output_dir": str(folder / "run"),
        "orchestrator_url": ours.recv(),
        "max_steps": steps,
        "threads": 1,
        # As `primerl rl` sets it for the embedded engine.
        "weights": {"probe": False},
        "model": {"path": str(folder / "model")},
        "log": {"level": "warning"},
    }
    try:
        code = rl.main(from_mapping(TrainerConfig, resolved(schema.TrainerConfig, values)))
    finally:
        ours.send("over")
        server.join()
    if code:
        raise SystemExit(code)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["tiny", "15m"])
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="wall")
    given = parser.parse_args()
    now = time.thread_time if given.clock == "cpu" else time.perf_counter
    met = True
    for name in given.models:
        with tempfile.TemporaryDirectory(prefix="primerl-bench-") as folder:
            met &= report(name, trained(name, Path(folder), given.steps, now))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
