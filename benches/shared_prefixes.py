"""What a step saves where samples begin alike: as a prefix tree against one after another, as packed without trees.

    python benches/shared_prefixes.py                          # 4 layers of 512: some minutes of one core
    python benches/shared_prefixes.py --layers 1 --vocabulary 1024     # a quarter of the work, in the same proportions

Forward and backward in fp32 on one thread, each in a process of its own, for a peak of memory of its own. Without
trees, rows hold at most 18,432 tokens. Seconds are those of the CPU, the least of `--rounds`; MiB are what a step adds
to the process. Goals are ratios of CPU seconds. Exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.distributed.fsdp import packed_logprobs
from primerl.train.model.flops import ModelShape
from primerl.train.model.packed_model import PackedSequences, load_model

CASES = {
    # Samples, tokens they share, tokens of each one's own, times faster that is asked for.
    "group 8 x (2,048 + 256)": (8, 2048, 256, 3.8),
    "group 16 x (512 + 512)": (16, 512, 512, 1.7),
    "ten branches off 4,096 + 512": (10, 4096, 512, 4.0),
    "nothing shared, 8 x 1,024": (8, 0, 1024, 0.97),
}
MOST_IN_ROW = 18_432


def samples(count: int, shared: int, own: int, vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, vocabulary, (shared,), generator=generator)
    return [torch.cat([start, torch.randint(0, vocabulary, (own,), generator=generator)]) for _ in range(count)]


def measure(folder: Path, case: str, tree: bool, vocabulary: int) -> dict[str, float]:
    """One step."""
    torch.set_num_threads(1)
    count, shared, own, _ = CASES[case]
    model, given = load_model(folder), samples(count, shared, own, vocabulary)
    in_row = count if tree else max(1, MOST_IN_ROW // (shared + own))
    rows = [given[start : start + in_row] for start in range(0, count, in_row)]
    shape, flops = ModelShape.of(model), 0.0
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for row in rows:
        common = [0] + [shared] * (len(row) - 1) if tree else []
        packed = PackedSequences.sharing([len(sample) for sample in row], common)
        # What each sample has of its own is trained.
        targets = torch.cat([torch.arange(max(shared, 1), shared + own) + i * (shared + own) for i in range(len(row))])
        logprobs, *_ = packed_logprobs(model, torch.cat(row), packed, targets)
        logprobs.mean().backward()
        flops += shape.flops(packed.lengths, len(targets), packed.shared)
    seconds = time.process_time() - began
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": seconds, "mib": mib, "flops": flops}


def best(folder: Path, case: str, tree: bool, given: argparse.Namespace) -> dict[str, float]:
    """The least of several rounds."""
    command = [sys.executable, __file__, "--measure", case, str(folder), "--vocabulary", str(given.vocabulary)]
    found = []
    for _ in range(given.rounds):
        ran = subprocess.run(
            [*command, *(["--tree"] if tree else [])], check=True, capture_output=True, text=True, encoding="utf-8"
        )
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    return {name: min(one[name] for one in found) for name in found[0]}


def main(given: argparse.Namespace) -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": given.layers, **heads}
        config = TinyConfig(**sizes, vocab_size=given.vocabulary, max_position_embeddings=16_384)
        write_model(Path(folder), config, seed=0)
        print(f"{given.layers} layers of 512, {given.vocabulary} words; without trees, as a tree, ratio")
        for case, (*_, goal) in CASES.items():
            plain, tree = (best(Path(folder), case, kind, given) for kind in (False, True))
            ratio = {name: plain[name] / max(tree[name], 1e-9) for name in plain}
            met = ratio["seconds"] >= goal
            missed += not met
            print(
                f"{case:30s} CPU s {plain['seconds']:7.2f} {tree['seconds']:7.2f} / {ratio['seconds']:.2f} "
                f"(goal {goal}: {'met' if met else 'MISSED'})  MiB {plain['mib']:6.0f} {tree['mib']:6.0f} "
                f"/ {ratio['mib']:.2f}  FLOPs / {ratio['flops']:.2f}",
                flush=True,
            )
    return int(missed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--tree", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(Path(options.measure[1]), options.measure[0], options.tree, options.vocabulary)))
        sys.exit(0)
    sys.exit(main(options))
