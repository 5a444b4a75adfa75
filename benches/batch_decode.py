"""Decoding a step's batch into torch tensors: CPU milliseconds for all data ranks of 512 samples.

    cargo bench -p primerl-record --bench encode -- --write outputs/bench_batch
    python benches/batch_decode.py outputs/bench_batch

Without a folder, it has the batch written first. Prints the least of several rounds, with the checks of every column
that decoding does, and what of it these checks are. The bodies lie in memory that may be written to, as the trainer
reads them off its connection.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from primerl.train.data import batch

ROUNDS = 50
REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "outputs/bench_batch"


def measure(bodies: list[bytearray]) -> float:
    """Least CPU milliseconds of decoding all bodies."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for body in bodies:
            batch.decode_batch(body)
        times.append(time.process_time() - start)
    return 1000 * min(times)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if not (folder / "rank_0.msgpack").exists():
        command = ["cargo", "bench", "--locked", "-p", "primerl-record", "--bench", "encode", "--"]
        subprocess.run([*command, "--write", str(folder.resolve())], check=True, cwd=REPOSITORY)
    bodies = [bytearray(path.read_bytes()) for path in sorted(folder.glob("rank_*.msgpack"))]
    batches = [batch.decode_batch(body) for body in bodies]
    tokens = sum(len(micro_batch.token_ids) for batch in batches for micro_batch in batch.micro_batches)
    whole = measure(bodies)
    with mock.patch.object(batch, "_is_sound", return_value=True):
        tensors = measure(bodies)
    print(f"{len(bodies)} ranks, {tokens} tokens, {sum(map(len, bodies)) / tokens:.2f} bytes a token")
    print(f"decode to tensors {tensors:.2f} ms, with the checks {whole:.2f} ms")


if __name__ == "__main__":
    main()
