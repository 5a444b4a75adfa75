"""Whether a run learns the same with shared prefixes and without: its batches, trained both ways.

    python benches/shared_prefix_run.py                        # makes a run first: about a minute of two cores
    python benches/shared_prefix_run.py --run outputs/rl       # the batches that lie in the spool of a run

A run samples its own rollouts, so two runs never have the same batches. Here a run of `examples/reverse-text` with the
embedded engine is recorded (long strings, answers of at most 48 tokens, groups of 8), and the policy trainer trains its
batches from its first weights, with the run's settings: with `shared_prefixes` "auto" and "off", each in a process of
its own. Prints by step how far losses, gradient norms, entropies and the divergence from the engine are apart, then the
last weights, the time of a step, and the trainer's CPU seconds. Exits 1 if they are further apart than rounding takes
them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "examples" / "reverse-text"
sys.path.insert(0, str(REPOSITORY / "tests"))

CURVES = ("loss/mean", "optim/grad_norm", "entropy/all/mean", "mismatch_kl/all/mean")
MOST_APART = {"loss/mean": 1e-6, "optim/grad_norm": 1e-4, "entropy/all/mean": 1e-5, "mismatch_kl/all/mean": 5e-6}
"""Goals: largest difference at any step, absolute, but relative for the norm."""
MOST_OF_MOVEMENT = 0.01
"""Goal: largest difference of a last weight, as a share of the largest change of one."""


def primerl(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "primerl", *arguments], capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def record(folder: Path, given: argparse.Namespace) -> Path:
    """A run on strings of about `letters` letters, by a model that learnt to put their last ones between tags."""
    draw, most = random.Random(0), given.letters
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(40 * given.taught):
            text = "".join(draw.choice("abcdefghij") for _ in range(draw.randint(most - most // 20, most)))
            answer = text[::-1][: draw.randint(3, 30)]
            answer = f"<r>{answer}</r>" if draw.random() > 0.3 else answer
            file.write(json.dumps({"prompt": f"Reverse: {text}", "completion": answer}) + "\n")
    tokens = 10 * (given.letters + 60)
    sft = ["--output-dir", str(folder / "sft"), "--data.path", str(folder / "data.jsonl"), "--threads", "1"]
    sizes = ["--data.batch-size", str(tokens), "--data.seq-len", str(min(tokens, 2048))]
    primerl("sft", "@", str(EXAMPLE / "sft.toml"), *sft, *sizes, "--max-steps", str(given.taught))
    strings = {"split": "train", "letters": "a-j", "min_length": most - most // 20, "max_length": most}
    environment = json.dumps([{"id": "reverse-text", "taskset": strings}])
    rl = ["--model.path", str(folder / "sft" / "weights" / f"step_{given.taught}"), "--output-dir", str(folder / "rl")]
    sizes = ["--seq-len", "2048", "--inference.max-model-len", "512", "--orchestrator.sampling.max-tokens", "48"]
    own = ["--orchestrator.train.env", environment, "--orchestrator.eval.env", "[]", "--orchestrator.batch-size", "64"]
    kept = ["--max-steps", str(given.steps), "--orchestrator.retention.spool-steps", str(given.steps)]
    primerl("rl", "@", str(EXAMPLE / "rl-ci.toml"), *rl, *sizes, *own, *kept)
    return folder / "rl"


def replay(run: Path, shared_prefixes: str, output: Path) -> dict[str, float]:
    """Trains the batches of the run's spool; the seconds of CPU that took."""
    from primerl.process.setting_checks import from_mapping
    from primerl.train.loop import rl
    from primerl.train.settings import TrainerConfig
    from train_helpers import Answer, OrchestratorDouble

    def answer(step: int, rank: int) -> Answer:
        return 200, (run / "spool" / f"step_{step}" / f"rank_{rank}.msgpack").read_bytes()

    settings: dict[str, Any] = tomllib.loads((run / "configs" / "trainer.toml").read_text(encoding="utf-8"))
    steps = len(list((run / "spool").glob("step_*")))
    with OrchestratorDouble(answer) as double:
        settings |= {"output_dir": str(output), "orchestrator_url": double.url, "max_steps": steps}
        config = from_mapping(TrainerConfig, {**settings, "shared_prefixes": shared_prefixes})
        began = time.process_time()
        code = rl.main(config)
        seconds = time.process_time() - began
    if code:
        sys.exit(code)
    return {"cpu_s": seconds}


def in_a_process(run: Path, shared_prefixes: str, output: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--replay", str(run), shared_prefixes, str(output)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights_apart(one: Path, other: Path) -> float:
    from rank_helpers import load_shards

    here, there = load_shards(one), load_shards(other)
    return max(float((here[name].float() - there[name].float()).abs().max()) for name in here)


def compare(run: Path, folder: Path) -> int:
    ways = {name: in_a_process(run, name, folder / name) for name in ("off", "auto")}
    lines = {name: lines_of(folder / name) for name in ways}
    names = list(CURVES)
    print("each value: without trees, and how far it is from that with trees")
    print("step computed  " + "  ".join(f"{name:>21}" for name in names))
    furthest = dict.fromkeys(names, 0.0)
    for plain, tree in zip(lines["off"], lines["auto"], strict=True):
        shown = []
        for name in names:
            apart = tree[name] - plain[name]
            share = apart / abs(plain[name]) if name == "optim/grad_norm" else apart
            furthest[name] = max(furthest[name], abs(share))
            shown.append(f"{plain[name]:>11.6f} {apart:>+9.1e}")
        print(f"{plain['step']:>4}  {tree['perf/shared_tokens']:6.1%}  " + "  ".join(shown))
    print("furthest apart: " + ", ".join(f"{name} {value:.1e}" for name, value in furthest.items()))
    started = Path(tomllib.loads((run / "configs" / "trainer.toml").read_text(encoding="utf-8"))["model"]["path"])
    last = f"weights/step_{lines['off'][-1]['step']}"
    apart, moved = (weights_apart(folder / "off" / last, other) for other in (folder / "auto" / last, started))
    print(f"last weights: {apart:.1e} apart; the run moved one by {moved:.1e}")
    for name in ("time/forward_backward", "time/step"):
        for kind, of in (("median", median), ("least", min)):
            plain, tree = (of([line[name] for line in lines[way]]) for way in ("off", "auto"))
            print(f"{name}, {kind}: {plain:.3f} s without, {tree:.3f} s with ({plain / tree:.1f} times less)")
    plain, tree = (ways[way]["cpu_s"] for way in ("off", "auto"))
    print(f"the trainer's CPU in all: {plain:.1f} s without, {tree:.1f} s with ({plain / tree:.1f} times less)")
    learns = all(line["optim/grad_norm"] > 0 for line in lines["off"])
    shares = all(line["perf/shared_tokens"] < 0.9 for line in lines["auto"])
    same = all(value <= MOST_APART[name] for name, value in furthest.items()) and apart <= MOST_OF_MOVEMENT * moved
    print(f"the same within rounding: {'met' if learns and shares and same else 'MISSED'}")
    return 0 if learns and shares and same else 1


def main(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return compare(given.run or record(folder, given), folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="output folder of a run that has ended")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--letters", type=int, default=400)
    parser.add_argument("--taught", type=int, default=80, help="steps of fine-tuning before the run")
    parser.add_argument("--replay", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay is not None:
        run, way, output = options.replay
        print(json.dumps(replay(Path(run), way, Path(output))))
        sys.exit(0)
    sys.exit(main(options))
