"""The whole demo for several seeds, and with shuffled advantages: wall time, reward, greedy exact match.

    python benches/demo_seeds.py                 # seeds 0-4 and one control, about 10 minutes on 2 cores
    python benches/demo_seeds.py --seeds 0 --output outputs/one-seed

A seed sets data, initial weights, sampling and the order of examples. Goals: SFT + 60 RL steps <= 120 s, mean reward
of the last 5 steps >= 0.9 and greedy exact match up by >= 0.2, in every seed; with shuffled advantages the reward of
the last 10 steps stays <= 0.75. Exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from primerl.runs.report import Results, load, mean

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "reverse-text"


def timed(*command: str) -> float:
    """Wall seconds of a command that has to succeed."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-3000:]}")
    return time.monotonic() - began


def fine_tune(folder: Path, seed: int) -> tuple[Path, float]:
    data, output = folder / "data.jsonl", folder / "sft"
    timed(str(EXAMPLE / "make_data.py"), "--output", str(data), "--seed", str(seed))
    wall_s = timed(
        *("-m", "primerl", "sft", "@", str(EXAMPLE / "sft.toml"), "--seed", str(seed), "--clean-output-dir"),
        *("--output-dir", str(output), "--data.path", str(data)),
    )
    return output / "weights" / "step_600", wall_s


def reinforce(model: Path, output: Path, seed: int, *more: str) -> tuple[Results, float]:
    wall_s = timed(
        *("-m", "primerl", "rl", "@", str(EXAMPLE / "rl.toml"), "--seed", str(seed), "--clean-output-dir"),
        *("--model.path", str(model), "--output-dir", str(output), *more),
    )
    return load(output), wall_s


def describe(results: Results) -> tuple[float, float, float, float]:
    reward = results.column("reward/all/mean")
    before, after = (evaluation["metrics"]["exact"] for evaluation in results.evaluations)
    return mean(reward[:5]), mean(reward[-5:]), before, after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("outputs/bench-seeds"))
    arguments = parser.parse_args()
    met = True
    print("seed     reward first 5 -> last 5   greedy exact    sft s   rl s   sum s")
    for seed in arguments.seeds:
        folder = arguments.output / str(seed)
        model, sft_s = fine_tune(folder, seed)
        results, rl_s = reinforce(model, folder / "rl", seed)
        first, last, before, after = describe(results)
        good = last >= 0.9 and after - before >= 0.2 and sft_s + rl_s <= 120
        met &= good
        print(
            f"{seed:<8} {first:.3f} -> {last:.3f}             {before:.2f} -> {after:.2f}    {sft_s:5.1f}  {rl_s:5.1f}"
            f"   {sft_s + rl_s:5.1f}  {'met' if good else 'MISSED'}",
            flush=True,
        )
    seed = arguments.seeds[0]
    folder = arguments.output / str(seed)
    shuffled = "--orchestrator.algorithm.shuffle-advantages"
    results, _ = reinforce(folder / "sft" / "weights" / "step_600", folder / "control", seed, shuffled)
    control = mean(results.column("reward/all/mean")[-10:])
    met &= control <= 0.75
    print(f"control  shuffled advantages, reward of the last 10 steps: {control:.3f} (<= 0.75)")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
