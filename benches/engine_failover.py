"""One of two engines is killed under load: what fails, how deep the dip is, and when it is back.

    python benches/engine_failover.py                     # fine-tunes a model first; vLLM where `make vllm` has made it
    python benches/engine_failover.py --model outputs/reverse-text-ci/sft/weights/step_300 --backend torch

A run of the short recipe on two engines; `kill -9` of one of the `primerl inference` processes, with its server. Prints
tokens/s second by second from ten seconds before it on, and after that
- rollouts that failed,
- the level before: the mean of the ten seconds before,
- the dip: the most seconds in a row, from the kill until ten seconds after the engine is back, in which tokens/s were
  below half of that level (the mean of three seconds: answers come in bursts),
- the restart: seconds from the kill until the engine has proved the current version.
The goal: no failed rollout, a dip shorter than 5 s + the restart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent / "tests"))

from demo_seeds import fine_tune
from end_to_end import EXAMPLE, find, until
from engine_helpers import VLLM_PYTHON
from primerl.launch.report import status as orchestrator_status

BEFORE_S, AFTER_S, START_S = 10, 10, 300.0
TICK_S = 0.1


class Load:
    """A run on two engines."""

    def __init__(self, model: Path, output: Path, backend: str, python: Path) -> None:
        self.output = output
        engines = ["--inference.backend", backend, "--inference.replicas", "2", "--inference.max-num-seqs", "32"]
        if backend == "vllm":
            engines += ["--inference.python", str(python)]
        # Engines are what limits it, as far as two cores let them: steps far ahead, large batches.
        work = ["--orchestrator.batch-size", "128", "--orchestrator.max-async-level", "4", "--max-steps", "100000"]
        paths = ["--model.path", str(model), "--output-dir", str(output), "--clean-output-dir"]
        config = ["@", str(EXAMPLE / "rl-ci.toml"), *paths, *engines, *work, "--orchestrator.eval.env", "[]"]
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with (self.output.parent / f"{self.output.name}.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "primerl", "rl", *config]
            self.launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def status(self) -> dict[str, Any]:
        if self.launcher.poll() is not None:
            raise SystemExit(f"the run has ended; see {self.output.parent / self.output.name}.log")
        try:
            address = json.loads((self.output / "run" / "orchestrator.json").read_text(encoding="utf-8"))["url"]
        except OSError:
            return {}
        return orchestrator_status.fetch(address) or {}

    def until(self, reached: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            return status if reached(status := self.status()) else None

        return dict(until(look, START_S, what))

    def pid_of(self, name: str) -> int:
        pid = find(str(self.output / "configs" / f"{name}.toml"))
        if pid is None:
            raise SystemExit(f"there is no process of {name}")
        return pid

    def stop(self) -> None:
        self.launcher.send_signal(signal.SIGINT)
        self.launcher.wait(60)


def both_serve(status: dict[str, Any]) -> bool:
    engines = status.get("engines", [])
    return len(engines) == 2 and all(engine["version"] is not None for engine in engines)


def watch(
    load: Load, killed_at: float, samples: list[tuple[float, int]], until: Callable[[dict[str, Any]], bool]
) -> None:
    """Adds (seconds since the kill, tokens sampled so far) until then."""
    while True:
        status = load.status()
        if status:
            samples.append((time.monotonic() - killed_at, int(status["tokens"]["sampled"])))
            if until(status):
                return
        time.sleep(TICK_S)


def per_second(samples: list[tuple[float, int]], second: int) -> float:
    """Tokens/s of `second` to `second + 1`, between samples by straight lines."""

    def at(when: float) -> float:
        for (t0, n0), (t1, n1) in itertools.pairwise(samples):
            if t0 <= when <= t1:
                return n0 + (n1 - n0) * (when - t0) / max(t1 - t0, 1e-9)
        return float(samples[-1][1] if when > samples[-1][0] else samples[0][1])

    return at(second + 1) - at(second)


def longest_row(seconds: list[int]) -> int:
    longest = row = 0
    for before, second in zip([None, *seconds], seconds, strict=False):
        row = row + 1 if before is not None and second == before + 1 else 1
        longest = max(longest, row)
    return longest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench-failover"))
    parser.add_argument("--backend", choices=["vllm", "torch"], default="vllm" if VLLM_PYTHON.exists() else "torch")
    parser.add_argument("--python", type=Path, default=VLLM_PYTHON, help="of the environment that vLLM is installed in")
    arguments = parser.parse_args()
    arguments.model = arguments.model or fine_tune(arguments.output, seed=0)[0]
    load = Load(arguments.model, arguments.output / "rl", arguments.backend, arguments.python)
    try:
        load.until(both_serve, "two engines that serve")
        sampled = load.status()["tokens"]["sampled"]
        load.until(lambda status: status.get("tokens", {}).get("sampled", 0) > sampled + 5000, "load")
        samples: list[tuple[float, int]] = []
        kill_at = time.monotonic() + BEFORE_S
        watch(load, kill_at, samples, lambda _: time.monotonic() >= kill_at)
        os.kill(load.pid_of("inference_1"), signal.SIGKILL)
        watch(load, kill_at, samples, lambda status: not both_serve(status))
        lost_s = samples[-1][0]
        watch(load, kill_at, samples, both_serve)
        restart_s = samples[-1][0]
        watch(load, kill_at, samples, lambda _: time.monotonic() > kill_at + restart_s + AFTER_S)
        status = load.status()
    finally:
        load.stop()
    return report(arguments.backend, samples, lost_s, restart_s, status)


def report(
    backend: str, samples: list[tuple[float, int]], lost_s: float, restart_s: float, status: dict[str, Any]
) -> int:
    rates = {second: per_second(samples, second) for second in range(-BEFORE_S, int(samples[-1][0]))}
    print(f"engines: {backend}; tokens/s from {BEFORE_S} s before the kill on:")
    print(" ".join(f"{second}:{rate:.0f}" for second, rate in rates.items()))
    before = sum(rates[second] for second in range(-BEFORE_S, 0)) / BEFORE_S
    smooth = {second: sum(rates[second + more] for more in (-1, 0, 1)) / 3 for second in range(list(rates)[-1])}
    low = [second for second, rate in smooth.items() if rate < before / 2]
    dip_s = longest_row(low)
    failed = sum(status["failures"].values()) + status["rollouts"]["failed"]
    print(f"failed rollouts          {failed}")
    print(f"requests sent again      {status['failovers']}")
    print(f"level before             {before:.0f} tokens/s")
    print(f"lowest (mean of 3 s)     {min(smooth.values()):.0f} tokens/s")
    print(f"dip: below half of it    {dip_s} s in a row, {len(low)} s in all: {low}")
    print(f"out of rotation after    {lost_s:.1f} s")
    print(f"restart                  {restart_s:.1f} s until it has proved the current version")
    return 0 if failed == 0 and dip_s < 5 + restart_s else 1


if __name__ == "__main__":
    sys.exit(main())
